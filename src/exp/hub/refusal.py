"""What a failure of huggingface_hub means for the user, in one line."""

from __future__ import annotations

import errno
from typing import Any

from exp.errors import ConfigError, UnavailableError
from exp.hub.cache import Source, cache_folder, endpoint
from exp.runfolder import without_credentials

__all__ = ["refusal"]


def refusal(library: Any, source: Source, error: Exception) -> ConfigError | UnavailableError:
    """What a failure of the library means, in one line."""
    errors, begin = library.errors, f"init_from={source.name}: "
    status = getattr(getattr(error, "response", None), "status_code", None)
    hub = without_credentials(endpoint())
    where = f"{hub}/{source.repository}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return UnavailableError(
            f"{begin}HF_HUB_OFFLINE is set, and the cache {cache_folder(source)} does not have it; unset that, or copy "
            "the cache of a machine that has it"
        )
    if isinstance(error, errors.GatedRepoError):
        return ConfigError(
            f"{begin}{where} is gated: accept its licence there and set HF_TOKEN to a token of yours, or take a copy "
            "that is not (timm:<name>)"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ConfigError(
            f"{begin}there is no {where}, or it is private; check the name, or set HF_TOKEN to a token that may read it"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(f"{begin}{where} has no revision {source.revision}; leave out @{source.revision} for main")
    if status in (401, 403):
        return ConfigError(f"{begin}{where} refuses access ({status}); set HF_TOKEN to a token that may read it")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        return UnavailableError(
            f"{begin}{error.strerror} in {cache_folder(source)}; make room, or set HF_HUB_CACHE to another folder"
        )
    if status is not None:
        return UnavailableError(f"{begin}{where} answers {status}; try again later, or another HF_ENDPOINT")
    said = str(error).strip().splitlines()
    reason = without_credentials(f"{type(error).__name__}: {said[0][:120] if said else ''}".rstrip(": "))
    return UnavailableError(
        f"{begin}cannot fetch it from {hub} ({reason}); set HF_ENDPOINT to a mirror, or give a file that you "
        "have; what was fetched is kept"
    )
