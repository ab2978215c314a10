"""Where the model `hf:NAME` is: a folder or file on this machine, or the hub."""

from __future__ import annotations

import os
from pathlib import Path

from acm_compiler.errors import ModelSourceError, nearest
from acm_compiler.recipe.load import installed_path


def place_of(name: str) -> str:
    """The path or hub name by which transformers finds `name`. ModelSourceError for a path that leads nowhere."""
    place = installed_path(name)
    if os.path.exists(place) or not _is_path(place):
        return place
    folders = Path(place).absolute().parents
    last = next(folder for folder in folders if folder.is_dir())
    raise ModelSourceError(
        f"there is no folder or file {place!r}{similar_paths(place)}",
        where=f"hf:{name}",
        found=f"the path ends at {last}" if last != folders[0] else None,
        fix="give a folder or config.json on this machine, or a name on the hub, such as google/vit-base-patch16-224",
    )


def _is_path(place: str) -> bool:
    """Whether `place` cannot be meant as a name on the hub, which is NAME or OWNER/NAME."""
    return place.startswith((".", os.sep, "~")) or place.count("/") > 1 or place.endswith("/")


def similar_paths(place: str) -> str:
    """A hint at what lies beside a path that leads nowhere; empty where nothing is alike, or where it does not."""
    folder, name = os.path.split(place)
    if os.path.exists(place) or not os.path.isdir(folder or "."):
        return ""
    alike = nearest(name, os.listdir(folder or "."), count=1)
    return f" (did you mean {os.path.join(folder, alike[0])!r}?)" if alike else ""


def out_of_reach(place: str) -> str | None:
    """Why nothing can be asked of the hub now; None where it answers, or need not be asked.

    It is asked once: transformers itself tries for half a minute, for every file.
    """
    if os.path.exists(place):
        return None
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    try:
        get_hf_file_metadata(hf_hub_url(place, "config.json"))
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set"
    except (HfHubHTTPError, ValueError):
        return None  # an answer, or no name that could be asked for: transformers says what is wrong
    except (HTTPError, OSError) as error:
        return f"the hub cannot be reached: {error}"
    return None
