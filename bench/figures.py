"""What figures share: matplotlib where it is installed, and how one is titled and written."""

from pathlib import Path
from typing import Any

NO_FIGURE = "No figure: matplotlib is not installed."


def pyplot() -> Any:
    """matplotlib.pyplot for drawing into files; None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def finish(figure: Any, title: str, lines: dict[str, Any], path: Path) -> None:
    """Write a figure with its title above and its lines' names below."""
    figure.suptitle(title, fontsize=11)
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=len(lines), frameon=False)
    figure.savefig(path, dpi=130)
    pyplot().close(figure)
