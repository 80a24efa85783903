"""Pictures: overlays, legends, contact sheets, feature maps and curves; arrays in, arrays or PNG bytes out."""
