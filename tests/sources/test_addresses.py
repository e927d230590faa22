"""Addresses as users write them: recognised before strengths, and never in place of a path."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_merge.addresses import (
    CIVITAI,
    HUB,
    OBJECTS,
    Address,
    output_address,
    parse,
    split,
    upload_address,
    upload_path,
    with_addresses,
)  # fmt: skip
from lora_merge.errors import UsageError

DIGEST = "0123456789abcdef" * 4
FORMS = [
    ("me/style", Address(HUB, "me/style")),
    ("me/style@v1.0", Address(HUB, "me/style", "v1.0")),
    ("me/style@refs/pr/3/unet", Address(HUB, "me/style", "refs/pr/3", "unet")),
    ("hf://me/style", Address(HUB, "me/style")),
    ("hf://models/me/style@main/a/b.safetensors", Address(HUB, "me/style", "main", "a/b.safetensors")),
    ("https://huggingface.co/me/style", Address(HUB, "me/style")),
    ("https://huggingface.co/me/style/tree/main", Address(HUB, "me/style", "main")),
    ("https://hf.co/me/style/blob/refs%2Fpr%2F1/a.safetensors", Address(HUB, "me/style", "refs/pr/1", "a.safetensors")),
    (
        "https://huggingface.co/me/s/resolve/main/a.safetensors?download=true",
        Address(HUB, "me/s", "main", "a.safetensors"),
    ),
    ("civitai:12345", Address(CIVITAI, "12345")),
    ("civitai:7@12345", Address(CIVITAI, "12345", model="7")),
    ("civitai:12345#9", Address(CIVITAI, "12345", file="9")),
    ("urn:air:sdxl:lora:civitai:7@12345", Address(CIVITAI, "12345", model="7", kind="sdxl:lora")),
    ("urn:air:flux1:lora:civitai:7@12345#9", Address(CIVITAI, "12345", model="7", file="9", kind="flux1:lora")),
    ("https://civitai.com/models/7/name-of-it?modelVersionId=12345", Address(CIVITAI, "12345", model="7")),
    ("https://civitai.red/models/7", Address(CIVITAI, "", model="7")),
    ("https://civitai.com/api/download/models/12345?type=Model&format=SafeTensor", Address(CIVITAI, "12345")),
    ("https://civitai.com/api/download/models/12345?fileId=9", Address(CIVITAI, "12345", file="9")),
    (f"sha256:{DIGEST.upper()}", Address("sha256", DIGEST)),
    ("ms://me/style@master", Address("ms", "me/style", "master")),
    ("https://modelscope.cn/models/me/style", Address("ms", "me/style")),
    ("https://example.org/a.safetensors", Address("https", "https://example.org/a.safetensors")),
    ("http://127.0.0.1:8000/a.safetensors", Address("https", "http://127.0.0.1:8000/a.safetensors")),
    ("s3://bucket/a/b.safetensors", Address("s3", "bucket/a/b.safetensors")),
    ("sftp://host:22/models/a.safetensors", Address("sftp", "sftp://host:22/models/a.safetensors")),
    ("abfs://box@account.dfs.core.windows.net/a", Address("abfs", "abfs://box@account.dfs.core.windows.net/a")),
    ("s3://bucket/b.safetensors?versionId=x.y_z", Address("s3", "bucket/b.safetensors", "x.y_z")),
]
HOSTS = r"https://((?:www\.)?(?:huggingface|hf|civitai|modelscope)\..*)"
FORMS += [
    (match[1], address) for text, address in FORMS if (match := re.fullmatch(HOSTS, text))
]  # as browsers show them
TAILS = ["", ":0.8", ":-1", ":.5", ":0.8,te=0", ",te=0,unet=0.5", ":1,lbw=1,0,0.5"]


@pytest.mark.few(60)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("text", "address"), FORMS, ids=[text for text, _ in FORMS])
def test_address_is_recognised_with_any_strength_behind_it(text: str, address: Address, tail: str) -> None:
    assert split(text + tail) == (address, tail)


@pytest.mark.parametrize("text", [text for text, _ in FORMS])
def test_address_in_its_own_spelling_is_the_same_address(text: str) -> None:
    address = parse(text)
    assert address is not None and parse(str(address)) == address and str(address)[-1].isalnum()


@pytest.mark.parametrize("text", [
    "style.safetensors", "me/style.safetensors", "me/loras/style.safetensors:0.8", "me/style.gguf:1", "me/jobs.yaml",
    "./me/style", "../me/style", "/me/style", "~/style", r"C:\style.safetensors:0.8", "C:/me/style", "style:0.8", "style", "4/5",
    "loras/*.safetensors", "me/a b", "<lora:me/style:0.8>", "me/..", "me/style/../../x",
])  # fmt: skip
def test_path_is_no_address(text: str) -> None:
    assert split(text) is None


@pytest.mark.parametrize("text", [
    "hf://gpt2", "hf://me/style/../../x", "hf://datasets/me/texts", "https://huggingface.co/datasets/me/texts", "civitai:abc",
    "sha256:12", "http://example.org/a.safetensors", "s3://bucket", "urn:air:sdxl:lora:huggingface:me/style", "ms://x", "huggingface.co/spaces/me/x",
])  # fmt: skip
def test_address_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        split(text)


@pytest.mark.parametrize("name", ["me/style", "hf:/me/style", "me"])
def test_local_path_of_that_name_comes_first(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir(parents=True)
    assert split("me/style" if name != "hf:/me/style" else "hf:/me/style") is None


WORD = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,8}", fullmatch=True)
NUMBER = st.floats(-9, 9).map(lambda x: f"{x:.3f}")


@given(WORD, WORD, WORD, st.sampled_from(["", ".safetensors", ".gguf", ".bin"]), NUMBER)
def test_hub_address_takes_no_strength_into_its_name(
    owner: str, name: str, file: str, ending: str, strength: str
) -> None:
    text = f"hf://{owner}/{name}@{file}/{file}{ending}"
    assert split(f"{text}:{strength}") == (Address(HUB, f"{owner}/{name}", file, f"{file}{ending}"), f":{strength}")


@given(st.text("abc/:@.,=#?%-0123456789", max_size=30))
def test_any_text_is_an_address_a_path_or_refused(text: str) -> None:
    for scheme in ("", "hf:", "civitai:", "https:", "s3:"):
        try:
            parts = split(scheme + text)
        except UsageError:
            continue
        if parts is not None:
            assert scheme + text == (scheme + text).removesuffix(parts[1]) + parts[1]
            assert not re.search(r"(^|/)\.\.?(/|$)", parts[0].path)


@pytest.mark.parametrize(
    "text", ["https://me:secret@example.org/a.safetensors?sig=secret#secret", "s3://b/k?versionId=1"]
)
def test_address_shows_no_secret(text: str) -> None:
    address = parse(text)
    assert address is not None
    for words in (str(address), address.download(), repr(address) if address.scheme in OBJECTS else ""):
        assert "secret" not in words


PARTS = st.text("ab.-_ %:é", min_size=1, max_size=8).filter(lambda s: s not in (".", ".."))


@given(st.sampled_from(OBJECTS), WORD, st.lists(PARTS, max_size=3))
def test_path_of_a_local_copy_is_that_of_its_object(scheme: str, bucket: str, key: list[str]) -> None:
    address = Address(scheme, "/".join([bucket, *key]))
    path = upload_path(address, Path("/cache"))
    assert upload_address(path) == address and len(path.relative_to("/cache").parts) == 3 + len(key)
    assert with_addresses(f"at {path}") == f"at {address}" or re.search(r"\s", str(address))


@given(WORD, WORD, st.sampled_from(["", "main", "v1.0"]), st.lists(PARTS, max_size=3))
def test_path_of_a_local_copy_is_that_of_its_repository(owner: str, name: str, branch: str, inside: list[str]) -> None:
    address = Address(HUB, f"{owner}/{name}", branch, "/".join(inside))
    assert upload_address(upload_path(address, Path("/cache"))) == address


@pytest.mark.parametrize(("text", "address"), [
    ("hf://me/sd", Address(HUB, "me/sd")), ("hf://me/sd@half/x/", Address(HUB, "me/sd", "half", "x")),
    ("https://huggingface.co/me/sd", Address(HUB, "me/sd")), ("s3://b", Address("s3", "b")),
    ("s3:/b/out/", Address("s3", "b/out")), ("gs://b/a.safetensors", Address("gs", "b/a.safetensors")),
    ("me/sd", None), ("out.safetensors", None), (r"C:\out.safetensors", None),
])  # fmt: skip
def test_output_is_an_address_with_a_scheme_or_a_path(text: str, address: Address | None) -> None:
    assert output_address(text) == address


@pytest.mark.parametrize("text", [
    "civitai:1", "https://example.org/a.safetensors", "ms://me/sd", f"sha256:{'0' * 64}", "hf://me", "hf://me/sd:0.5",
    f"hf://me/sd@{'0' * 40}", "hf://me/sd@refs/pr/1", "s3://b/a?versionId=1", "s3://b/../a", "s3://b//a", "hf://datasets/me/x",
])  # fmt: skip
def test_address_that_takes_no_output_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        output_address(text)
