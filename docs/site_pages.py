"""What the site (``mkdocs.yml``) makes of the repository: pages that lie outside ``docs``, links, the reference.

MkDocs loads this file as a hook, and Griffe as an extension. Neither imports exp: signatures and docstrings are read
from the source, so that a site needs no torch.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from griffe import Extension
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

__all__ = ["PlainRoles", "on_files", "on_page_markdown", "on_post_page"]

ROOT = Path(__file__).parents[1]
# Pages of the repository's top folder, by their names on the site.
TOP = {"index.md": "README.md", **{name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")}}
# What the reference has, by page: a title, what it is for, and names in the source.
REFERENCE = {
    "python": (
        "Python",
        "Runs from Python, as [in a notebook](../guide/python.md).",
        ["exp.api.open_run", "exp.api.OpenRun", "exp.api.open_sweep", "exp.api.run"],
    ),
    "interfaces": (
        "Interfaces",
        "What can be added from outside: [models, data, metrics](../tutorial/add-an-experiment.md), "
        "[tasks, launchers, wrappers, loggers](../extend/add-a-task.md), "
        "[backends](../extend/add-a-backend.md).",
        [
            "exp.models.base.Model",
            "exp.data.base.Data",
            "exp.data.extensions.DataExtensions",
            "exp.data.extensions.Units",
            "exp.metrics.Metric",
            "exp.metrics.SampleMetric",
            "exp.metrics.Table",
            "exp.task.Task",
            "exp.launcher.base.Launcher",
            "exp.engine.wrapper.Wrapper",
            "exp.engine.wrapper.TrainStep",
            "exp.engine.wrapper.wrap",
            "exp.hardware.backend.Backend",
            "exp.plugins.Plugin",
            "exp.plugins.Family",
            "exp.forecasting.model.Forecaster",
            "exp.forecasting.outputs.Output",
            "exp.forecasting.data.series.Column",
            "exp.forecasting.peers.Peer",
            "exp.vision.data.layouts.Layout",
            "exp.vision.data.base.ImageData",
            "exp.vision.data.base.DistillationData",
            "exp.vision.models.ImageModel",
            "exp.vision.backbones.base.Backbone",
            "exp.vision.heads.Head",
            "exp.vision.losses.Loss",
            "exp.vision.losses.ValueLoss",
        ],
    ),
    "keys": (
        "Keys",
        "Every key of the configuration, its type, default and unit. `python -m exp --help` has the choices, and "
        "`--cfg job` what a command line comes to.",
        [
            "exp.config.schema",
            "exp.launcher.slurm.keys",
            "exp.forecasting.timebridge.keys",
            "exp.forecasting.keys",
            "exp.vision.config",
            "exp.vision.data.keys",
            "exp.vision.keys",
            "exp.vision.backbones.keys",
        ],
    ),
    "significance": (
        "Significance",
        "Tests for [your own task](../extend/add-a-task.md) or script: whether a difference is more than noise.",
        ["exp.significance"],
    ),
    "errors": ("Errors", "What a run ends with; [exit codes](../concepts/run.md#exit-codes).", ["exp.errors"]),
}
# Keys tell their own names; a signature of thirty says nothing more.
_OF_KEYS = "\n    options: {show_if_no_docstring: true, show_signature: false, separate_signature: false}"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
_ROW = re.compile(r"^\|.*$", re.MULTILINE)
# What a browser would fetch from elsewhere by itself.
_FOREIGN = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc="?(?:https?:)?//[^>]*>|<link\b[^>]*\bhref="?(?:https?:)?//[^>]*>"""
)
_ROLE = re.compile(r":(?:class|meth|func|mod|attr|data|exc|obj):`(~?)([^`]+)`")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are no files of ``docs``."""
    for name, path in TOP.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text(encoding="utf-8")))
    for name, (title, purpose, members) in REFERENCE.items():
        options = _OF_KEYS if name == "keys" else ""
        text = "\n\n".join([f"# {title}", purpose, *(f"::: {member}{options}" for member in members)])
        files.append(File.generated(config, f"reference/{name}.md", content=text + "\n"))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links between the repository's files into those of the site; one to what is not there keeps its text."""
    del config
    name = page.file.src_uri
    if name.startswith("reference/"):
        return markdown
    folder = "" if name in TOP else posixpath.join("docs", posixpath.dirname(name))

    def link(found: re.Match[str]) -> str:
        image, text, target, anchor = found[1], found[2], found[3], found[4] or ""
        if not target or re.match(r"\w+:", target):
            return found[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        on_site = next((key for key, value in TOP.items() if value == path), re.sub("^docs/", "", path))
        there = files.get_file_from_path(on_site)
        if there is None or there.inclusion.is_excluded():
            return text if (ROOT / path).exists() else found[0]  # MkDocs tells of one that leads nowhere
        return f"{image}[{text}]({posixpath.relpath(on_site, posixpath.dirname(name) or '.')}{anchor})"

    parts = re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _ROW.sub(_with_bars, _LINK.sub(link, part)) for part in parts)


def _with_bars(row: re.Match[str]) -> str:
    """A table's row; in its code GitHub wants bars escaped, and Python-Markdown shows the escape."""
    return re.sub("`[^`]*`", lambda code: code[0].replace(r"\|", "|"), row[0])


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Refuse a page that asks something of the network.

    Raises:
        PluginError: it does; names the tag.
    """
    del config
    found = _FOREIGN.search(output)
    if found is not None:
        raise PluginError(f"{page.file.src_uri}: the site asks nothing of the network, but here is {found[0]}")
    return output


class PlainRoles(Extension):
    """Sphinx's roles, which docstrings have for readers of the source, as links of the site."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Change the docstring of an object that has been read."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(_reference, obj.docstring.value)


def _reference(found: re.Match[str]) -> str:
    name = found[2]
    shown = name.rsplit(".", 1)[-1] if found[1] else name
    if "." not in name:
        return f"`{shown}`"
    return f'<autoref identifier="{name}" optional><code>{shown}</code></autoref>'
