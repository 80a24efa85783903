"""Figures and pictures: sizes, fonts, file formats and training curves."""
