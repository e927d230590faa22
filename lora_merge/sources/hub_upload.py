"""Uploads to the Hugging Face hub, by huggingface_hub: one commit, made when all its files are on the hub.

Files of weights are sent one by one before the commit, each as soon as it is final. What the hub has already, by its
SHA-256, is not sent again: so a run that is repeated after a failure continues the upload, as the same inputs give the
same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..addresses import HUB, Address
from ..errors import MergeError, OutputExists, ResourceError, UsageError
from ..paths import WEIGHT_SUFFIXES
from ..process import begin_commit
from ..progress import Progress, Step
from ..text import Note, listed
from ..version import __version__
from .hub import INSTALL, client, failed, is_installed, ranges_of
from .inputs import forget
from .sent_files import (
    FileSource,
    GrowingFile,
    Sending,
    address_of,
    compare,
    differs,
    files_of,
    size_of,
)

MAIN: Final = "main"
CARD: Final = "README.md"
TRIES: Final = 3  # of one file, if the connection breaks
MESSAGE: Final = f"Upload with lora-merge {__version__}"

LOGIN: Final = "use a token with the role write: hf auth login, or HF_TOKEN"
NETWORK: Final = "check the network, or run again later"
CONTINUED: Final = "run again: what the hub has by then is not sent again"


class HubSink:
    """A repository of a model."""

    def card_of(self, target: Path) -> Path:
        """Return the path of the card of the repository."""
        depth = address_of(target).path.count("/") + 1
        return target.parents[depth - 1] / CARD

    def check(self, target: Path, inputs: Sequence[Path], *, overwrite: bool, contents: Sequence[str] | None) -> bool:
        """Return whether there are files that are replaced; MergeError if they may not be, or if the token may not
        write."""
        address = address_of(target)
        if not is_installed():
            raise UsageError("outputs to the hub need huggingface_hub", str(address), INSTALL)
        api = client()
        try:
            state = _state(api, address)
            if state is None:
                _require_owner(api, address)
                return False
            _require_right(api, address)
        except Exception as e:  # noqa: BLE001  # the library has dozens of errors, in two versions of its HTTP client
            raise _failed(address, e, NETWORK) from None
        names = [_inside(address, name) for name in contents or [""]]
        taken = _taken(state, names)
        if taken and not overwrite:
            raise _exists(address, taken)
        folder = f"{address.path}/" if address.path else ""
        others = [n for n in state.files if n.startswith(folder) and "/" not in n[len(folder) :] and n not in names]
        if contents is not None and (lost := sorted(n for n in others if Path(n).suffix.lower() in WEIGHT_SUFFIXES)):
            raise UsageError("the repository holds weights that the merged model does not have",
                             f"{address}: {listed(lost)}",
                             "choose another repository, or a folder in it")  # fmt: skip
        return bool(taken)

    def begin(self, copy: Path, target: Path, *, overwrite: bool, progress: Progress) -> HubUpload:
        """Return the upload of a local copy."""
        return HubUpload(copy, target, overwrite=overwrite, progress=progress)


class HubUpload:
    """The upload of a file or a folder, which ends with one commit."""

    def __init__(self, copy: Path, target: Path, *, overwrite: bool, progress: Progress) -> None:
        self.address = address_of(target)
        self._copy, self._overwrite, self._progress, self._api = copy, overwrite, progress, client()
        self._sending = Sending(self._send)
        self._created: list[str] = []
        """The repository and the branch that this upload has created."""
        self._opened = False
        self._first: str | None = None
        """The commit with which they begin."""

    def ready(self, name: str, size: int, end: int) -> None:
        """Send a file of weights that is final."""
        if end == size and Path(name or self.address.path).suffix.lower() in WEIGHT_SUFFIXES:
            self._sending.ready(_inside(self.address, name), self._copy / name, size, end)

    def _open(self) -> None:
        """Create the repository and the branch if they are not there."""
        state = _state(self._api, self.address)
        if state is None:
            self._create(f"the new private repository {self.address.name}", self._api.create_repo, private=True,
                         exist_ok=True)  # fmt: skip
            state = _state(self._api, self.address) or RepositoryState([], None)
            self._first = state.head
        if not state.branch:
            branch = self.address.revision
            self._create(f"the new branch {branch} of {self.address.name}", self._api.create_branch, branch=branch)
            self._first = state.head
        self._opened = True

    def _create(self, what: str, create: Callable[..., object], **named: object) -> None:
        """Create a repository or a branch, which the error of a later failure names: also if the reply is lost."""
        from huggingface_hub.errors import HfHubHTTPError

        self._created.append(what)
        try:
            create(self.address.name, **named)
        except HfHubHTTPError:  # the hub refuses it
            self._created.pop()
            raise

    def _send(self, name: str, file: GrowingFile) -> Any:
        """Send the content of a large file; return what the commit says of it."""
        from huggingface_hub import CommitOperationAdd

        address, source = self.address, file.source
        try:
            if not self._opened:
                self._open()
            operation = CommitOperationAdd(name, source if isinstance(source, bytes) else str(source))
            for left in reversed(range(TRIES)):
                try:
                    with _silent():
                        self._api.preupload_lfs_files(
                            address.name, [operation], revision=address.revision or MAIN, free_memory=False
                        )
                    break
                except Exception as e:
                    if not left or not isinstance(_failed(address, e), ResourceError):
                        raise
        except Exception as e:  # noqa: BLE001  # the library has dozens of errors, in two versions of its HTTP client
            raise _failed(address, e) from None
        self._sending.count(file.size)
        return operation

    def finish(self, card: bytes | None) -> Sequence[Note]:
        """Send the rest, commit all files, and compare what is there with the local copy."""
        address, api = self.address, self._api
        # Step 1: the content of all files.
        files: dict[str, FileSource] = {_inside(address, name): path for name, path in files_of(self._copy)}
        if card is not None:
            files[CARD] = card
        operations = self._sending.finish(files, address, self._progress)
        try:
            # Step 2: the commit.
            state = _state(api, address) or RepositoryState([], None)
            free = self._overwrite or (state.head is not None and state.head == self._first)
            if not free and (taken := _taken(state, files)):
                raise _exists(address, taken)
            begin_commit()
            pinned = Address(HUB, address.name, _commit(api, address, operations, state.head))
            # Step 3: what is there now.
            self._progress(Step("prove", str(address)))
            _prove(api, pinned, dict(zip(files.values(), operations, strict=True)))
        except Exception as e:  # noqa: BLE001  # as above
            raise _failed(address, e) from None
        forget(address)
        text = f"uploaded to {address} as commit {pinned.revision}"
        notes = [Note(f"{place} was created") for place in self._created]
        return [*notes, Note(f"{text}: hashes, headers and samples there are those of the local copy")]

    def stop(self) -> Sequence[str]:
        """End the upload. What the hub has by then is no file of the repository, and a later upload uses it: so what
        was created stays, and is named.

        The library cannot be interrupted: nothing waits for the file that it sends.
        """
        self._sending.stop()
        return self._created


@contextmanager
def _silent() -> Iterator[None]:
    """Let the library draw no bar of its own for what the block sends, unless its user has decided on that."""
    from huggingface_hub import constants

    bars: Any = import_module("huggingface_hub.utils")
    if constants.HF_HUB_DISABLE_PROGRESS_BARS is not None or bars.are_progress_bars_disabled():
        yield
        return
    bars.disable_progress_bars()
    try:
        yield
    finally:
        bars.enable_progress_bars()


def _inside(address: Address, name: str) -> str:
    """Return the name in the repository of a file of the output."""
    return "/".join(part for part in (address.path, name) if part)


class RepositoryState(NamedTuple):
    """The files of a repository and its last commit. `branch`: whether they are those of the branch of the output, and
    not those of `main`, with which a new branch begins."""

    files: Sequence[str]
    head: str | None
    branch: bool = True


def _state(api: Any, address: Address) -> RepositoryState | None:
    """Return the state of a repository; None for one that is not there."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        try:
            info, branch = api.model_info(address.name, revision=address.revision or None), True
        except RevisionNotFoundError:
            info, branch = api.model_info(address.name), not address.revision
    except RepositoryNotFoundError:
        return None
    return RepositoryState([f.rfilename for f in info.siblings or ()], str(info.sha), branch)


def _taken(state: RepositoryState, names: Iterable[str]) -> list[str]:
    """Return those of these names that files of a branch have."""
    return sorted({*state.files} & {*names}) if state.branch else []


def _exists(address: Address, taken: Sequence[str]) -> OutputExists:
    return OutputExists("the output exists", f"{address}: {listed(taken)}",
                        "choose another repository, branch or name, or give `--overwrite`")  # fmt: skip


def _require_owner(api: Any, address: Address) -> None:
    """Raise UsageError if the token cannot create a repository: without any, for a name of somebody else."""
    from huggingface_hub import get_token

    if not get_token():
        raise UsageError("the hub has no such repository that you may see; creating one requires a token",
                         str(address), LOGIN)  # fmt: skip
    me = api.whoami()
    owner, role = address.name.partition("/")[0], me.get("auth", {}).get("accessToken", {}).get("role")
    names = [str(me.get("name", "")), *(str(org.get("name", "")) for org in me.get("orgs", ()))]
    if owner.lower() not in map(str.lower, names):
        raise UsageError("the token may not create a repository there", str(address),
                         f"write hf://{names[0]}/{address.name.partition('/')[2]}")  # fmt: skip
    if role == "read":
        raise UsageError("the token may read only", str(address), LOGIN)


def _require_right(api: Any, address: Address) -> None:
    """Raise an error of the library if the token may not write to a repository that is there."""
    from inspect import signature

    if "write" in signature(api.auth_check).parameters:  # since huggingface_hub 2
        api.auth_check(address.name, write=True)


def _commit(api: Any, address: Address, operations: list[Any], head: str | None) -> str:
    """Commit files behind a commit; return the new one."""
    try:
        commit = api.create_commit(
            address.name, operations, commit_message=MESSAGE, revision=address.revision or MAIN, parent_commit=head
        )
    except Exception as e:
        if not isinstance(_failed(address, e), ResourceError):
            raise
        state = _state(api, address)  # the reply may be lost, and not the commit: the comparison shows whose it is
        if state is None or state.head in (None, head):
            raise
        return str(state.head)
    return str(commit.oid)


def _prove(api: Any, pinned: Address, sources: dict[FileSource, Any]) -> None:
    """Compare the files of a commit with the local copy; VerificationFailed if any differ. `sources`: file of the local
    copy → what the commit says of it."""
    names = [operation.path_in_repo for operation in sources.values()]
    uploaded = {f.path: f for f in api.get_paths_info(pinned.name, names, revision=pinned.revision)}
    for source, operation in sources.items():
        name, size, info = operation.path_in_repo, size_of(source), uploaded.get(operation.path_in_repo)
        where = Address(HUB, pinned.name, pinned.revision, name)
        if info is None or info.size != size:
            raise differs(where, "size")
        if (info.lfs.sha256 != operation.upload_info.sha256.hex()) if info.lfs else (info.blob_id != _git_hash(source)):
            raise differs(where, "hash")
        compare(ranges_of(where, size), source, where)


def _git_hash(source: FileSource) -> str:
    size = size_of(source)
    digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    for data in GrowingFile(source, size, size).pieces():
        digest.update(data)
    return digest.hexdigest()


def _failed(address: Address, e: Exception, network: str = CONTINUED) -> MergeError:
    """Return the error for a failure of the library on writing. `network`: what to do where it is the network's."""
    cause = e.__cause__ if type(e) is RuntimeError and isinstance(e.__cause__, Exception) else e
    status = getattr(getattr(cause, "response", None), "status_code", 0)
    if isinstance(cause, MergeError):
        return cause
    if status in (401, 403):
        return UsageError("the hub refuses write access", str(address),
                          f"{LOGIN}; if it has that, see the storage limit of your account")  # fmt: skip
    if status in (409, 412):
        return UsageError("someone else changed the repository during the run", str(address), "run again")
    error = failed(address, cause)
    return ResourceError(error.what, error.where, network) if isinstance(error, ResourceError) else error
