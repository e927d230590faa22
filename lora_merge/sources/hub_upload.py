"""Uploads to the Hugging Face hub, by huggingface_hub: one commit, made when all its files are on the hub.

Files of weights are sent one by one before the commit. What the hub has already, by its SHA-256, is not sent again: so
a run that is repeated after a failure continues the upload, as the same inputs give the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from ..addresses import HUB, Address
from ..errors import MergeError, ResourceError, UsageError
from ..paths import WEIGHT_SUFFIXES
from ..process import begin_commit
from ..progress import Progress, Step, counted
from ..text import Note, listed
from ..version import __version__
from .hub import INSTALL, NAME, SITE, endpoint, failed, is_installed
from .inputs import forget
from .sent_files import Source, address_of, compare, differs, files_of, pieces, size_of
from .web import Endpoint, ranges

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

    def check(self, target: Path, inputs: Sequence[Path], *, overwrite: bool, contents: Sequence[str] | None) -> None:
        """Raise MergeError if there are files that may not be replaced, or if the token may not write."""
        address = address_of(target)
        if not is_installed():
            raise UsageError("outputs to the hub need huggingface_hub", str(address), INSTALL)
        api = _api()
        try:
            state = _state(api, address)
            if state is None:
                _require_owner(api, address)
                return
            _require_right(api, address)
        except Exception as e:  # noqa: BLE001  # the library has dozens of errors, in two versions of its HTTP client
            raise _failed(address, e, NETWORK) from None
        names = [_inside(address, name) for name in contents or [""]]
        if not overwrite:
            _require_free(address, state, names)
        folder = f"{address.path}/" if address.path else ""
        others = [n for n in state.files if n.startswith(folder) and "/" not in n[len(folder) :] and n not in names]
        if contents is not None and (lost := sorted(n for n in others if Path(n).suffix.lower() in WEIGHT_SUFFIXES)):
            raise UsageError("the repository holds weights that the merged model does not have",
                             f"{address}: {listed(lost)}",
                             "choose another repository, or a folder in it")  # fmt: skip

    def send(
        self, copy: Path, target: Path, card: bytes | None, *, overwrite: bool, progress: Progress
    ) -> Sequence[Note]:  # fmt: skip
        """Upload a file or a folder in one commit, and compare what is there with the local copy."""
        address, api, notes = address_of(target), _api(), list[Note]()
        try:
            with _silent():
                # Step 1: the repository and the branch.
                files: dict[str, Source] = {_inside(address, name): path for name, path in files_of(copy)}
                state = _state(api, address)
                if state is None:
                    api.create_repo(address.name, private=True, exist_ok=True)
                    notes.append(Note(f"a private repository was created: {address.name}"))
                    state = _state(api, address) or State([], None)
                if not overwrite:
                    _require_free(address, state, files)
                if not state.branch:
                    api.create_branch(address.name, branch=address.revision)
                # Step 2: the weights.
                if card is not None:
                    files[CARD] = card
                operations = _sent(api, address, files, progress)
                # Step 3: the commit.
                begin_commit()
                pinned = Address(HUB, address.name, _commit(api, address, operations, state.head))
                # Step 4: what is there now.
                progress(Step("prove", str(address)))
                _prove(api, pinned, files)
        except Exception as e:  # noqa: BLE001  # as above
            raise _failed(address, e) from None
        forget(address)
        text = f"uploaded to {address} as commit {pinned.revision}"
        return [*notes, Note(f"{text}: hashes, headers and samples there are those of the local copy")]


def _inside(address: Address, name: str) -> str:
    """Return the name in the repository of a file of the output."""
    return "/".join(part for part in (address.path, name) if part)


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(endpoint=endpoint(), library_name=NAME, library_version=__version__)


class State(NamedTuple):
    """The files of a repository and its last commit. `branch`: whether they are those of the branch of the output, and
    not those of `main`, with which a new branch begins."""

    files: Sequence[str]
    head: str | None
    branch: bool = True


def _state(api: Any, address: Address) -> State | None:
    """Return the state of a repository; None for one that is not there."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        try:
            info, branch = api.model_info(address.name, revision=address.revision or None), True
        except RevisionNotFoundError:
            info, branch = api.model_info(address.name), not address.revision
    except RepositoryNotFoundError:
        return None
    return State([f.rfilename for f in info.siblings or ()], str(info.sha), branch)


def _require_free(address: Address, state: State, names: Iterable[str]) -> None:
    """Raise UsageError if a branch has files of these names."""
    if state.branch and (taken := sorted({*state.files} & {*names})):
        raise UsageError("the output exists", f"{address}: {listed(taken)}",
                         "choose another repository, branch or name, or give --overwrite")  # fmt: skip


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


def _sent(api: Any, address: Address, files: dict[str, Source], progress: Progress) -> list[Any]:
    """Send the content of large files; return what the commit is made of."""
    from huggingface_hub import CommitOperationAdd

    advance = counted(progress, "upload", str(address), sum(map(size_of, files.values())))
    operations = []
    for name, source in files.items():
        operation = CommitOperationAdd(name, source if isinstance(source, bytes) else str(source))
        for left in reversed(range(TRIES)):
            try:
                api.preupload_lfs_files(address.name, [operation], revision=address.revision or MAIN, free_memory=False)
                break
            except Exception as e:
                if not left or not isinstance(_failed(address, e), ResourceError):
                    raise
        operations.append(operation)
        advance(size_of(source))
    return operations


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


def _prove(api: Any, pinned: Address, files: dict[str, Source]) -> None:
    """Compare the files of a commit with the local copy; VerificationFailed if any differ."""
    from huggingface_hub import get_token

    uploaded = {f.path: f for f in api.get_paths_info(pinned.name, [*files], revision=pinned.revision)}
    for name, source in files.items():
        where, size, info = Address(HUB, pinned.name, pinned.revision, name), size_of(source), uploaded.get(name)
        if info is None or info.size != size:
            raise differs(where, "size")
        if (info.lfs.sha256 != _sha256(source)) if info.lfs else (info.blob_id != _git_hash(source)):
            raise differs(where, "hash")
        url = f"{endpoint() or SITE}/{pinned.name}/resolve/{pinned.revision}/{quote(name)}"
        compare(ranges(Endpoint(where, url, get_token() or ""), size), source, where)


def _sha256(source: Source) -> str:
    digest = hashlib.sha256()
    for data in pieces(source):
        digest.update(data)
    return digest.hexdigest()


def _git_hash(source: Source) -> str:
    digest = hashlib.sha1(f"blob {size_of(source)}\0".encode(), usedforsecurity=False)
    for data in pieces(source):
        digest.update(data)
    return digest.hexdigest()


@contextmanager
def _silent() -> Iterator[None]:
    """Let the library draw no bars of its own."""
    from huggingface_hub import constants

    bars: Any = import_module("huggingface_hub.utils")
    if constants.HF_HUB_DISABLE_PROGRESS_BARS is not None or bars.are_progress_bars_disabled():
        yield  # as the user says
        return
    bars.disable_progress_bars()
    try:
        yield
    finally:
        bars.enable_progress_bars()


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
