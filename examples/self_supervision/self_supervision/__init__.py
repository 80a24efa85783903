"""Self-supervised training of image backbones: losses of DINO, iBOT, KoLeo and Gram anchoring."""
