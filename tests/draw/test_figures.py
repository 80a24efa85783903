"""Figures as files: format, size and letters."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from PIL import Image

from exp.config.schema import FiguresConfig
from exp.draw.figure import encode_picture, label, new_figure, render_file, title_and_legend


def plot(title="title", names=("a", "b")):
    figure = new_figure(8, 4)
    axes = figure.add_subplot()
    for name in names:
        axes.plot([0, 1], [0, 1], label=label(name))
    title_and_legend(axes, title)
    return figure


def image(content):
    return Image.open(io.BytesIO(content))


def test_a_figure_has_the_size_asked_for_in_every_format():
    wanted = FiguresConfig(format="pdf", width=3.5, dpi=200)
    files = encode_picture(plot(), wanted)
    assert list(files) == ["png", "pdf"]
    assert image(files["png"]).size == (700, 350)
    box = re.search(rb"/MediaBox \[ ?0 0 (\S+) (\S+?) ?\]", files["pdf"])
    assert [float(number) for number in box.groups()] == pytest.approx([3.5 * 72, 1.75 * 72])
    assert b"/Type3" not in files["pdf"]  # which publishers refuse
    assert encode_picture(plot(), wanted)["pdf"] == files["pdf"], "no date in it"
    figure = plot()
    assert re.search(rb'width="288(\.0*)?pt"', encode_picture(figure, FiguresConfig(format="svg", width=4))["svg"])
    assert min(text.get_fontsize() for text in figure.axes[0].get_xticklabels()) >= 6


def test_pixels_stay_as_they_are():
    pixels = np.random.default_rng(0).integers(0, 256, (30, 60, 3), dtype=np.uint8)
    files = encode_picture(pixels, FiguresConfig(format="svg", width=3))
    assert (np.asarray(image(files["png"])) == pixels).all()
    assert image(files["png"]).info["dpi"] == pytest.approx((20, 20), rel=1e-2)
    assert re.search(rb'width="216(\.0*)?pt"', files["svg"])


def test_names_are_drawn_letter_by_letter():
    """A formula would be an error; a label that begins with _ would not be in the legend."""
    figure = plot("$x^2$ of $y", ["_hidden", "$a$"])  # an odd number of dollars, too
    render_file(figure, "png")
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == [" _hidden", "$a$"]
