"""The model interface and dropout. The models themselves are in the packages of their experiments."""
