"""Model cards: front matter for hubs, the text of an earlier card, and what a card may not do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import lora_merge
from lora_merge.planning.model_card import BEGIN, CARD_END
from tests.kit.adapters import kohya
from tests.kit.command_line import run
from tests.kit.files import metadata, save
from tests.kit.models import sd1_sample
from tests.kit.tensors import rand

BASE_CARD = (
    "---\nlicense: mit\ntags: [llama]\nbase_model: someone/other\nwidget: [{text: hi}]\n---\n\n# Base\n\nIts words.\n"
)


@pytest.fixture
def inputs(tmp_path: Path) -> tuple[Path, Path]:
    """A folder of transformers, and an adapter folder."""
    base, adapter = tmp_path / "llm", tmp_path / "peft"
    base.mkdir()
    adapter.mkdir()
    save({f"model.layers.{n}.self_attn.q_proj.weight": rand(8, 8) for n in range(2)}, base / "model.safetensors")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "_name_or_path": "meta/llm"}
    (base / "config.json").write_text(json.dumps(config))
    start = "base_model.model.model.layers.0.self_attn.q_proj"
    save(
        {f"{start}.lora_A.weight": rand(2, 8), f"{start}.lora_B.weight": rand(8, 2)},
        adapter / "adapter_model.safetensors",
    )
    told = {
        "base_model_name_or_path": "meta/named-by-peft",
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 2,
        "target_modules": ["q_proj"],
    }
    (adapter / "adapter_config.json").write_text(json.dumps(told))
    return base, adapter


def front(text: str) -> dict[str, Any]:
    """The front matter."""
    found: dict[str, Any] = yaml.safe_load(text.split("---\n")[1])
    return found


def test_card_of_the_base_gets_our_section_and_keeps_its_text(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = inputs
    (base / "README.md").write_text(BASE_CARD)
    (adapter / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    out = tmp_path / "out"
    lora_merge.merge(base, [(adapter, 0.5)], out)
    text = (out / "README.md").read_text()
    found = front(text)
    assert found["base_model"] == ["meta/llm", "peft"]
    assert found["base_model_relation"] == "merge"
    assert found["tags"] == ["llama", "merge", "lora-merge"]
    assert found["widget"] == [{"text": "hi"}]
    assert (found["license"], found["library_name"]) == ("other", "transformers")
    assert "`llm`: mit; `peft`: apache-2.0" in text
    assert text.index(BEGIN) < text.index("strength 0.5") < text.index(CARD_END) < text.index("Its words.")
    again = tmp_path / "again"
    lora_merge.merge(out, [(adapter, 0.25)], again)
    more = (again / "README.md").read_text()
    assert more.count(BEGIN) == 1
    assert "strength 0.25" in more
    assert "strength 0.5" not in more


def test_card_that_a_person_edited_survives_another_merge_into_its_folder(
    inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    base, adapter = inputs
    (base / "README.md").write_text(BASE_CARD)
    out = tmp_path / "out"
    lora_merge.merge(base, adapter, out)
    card = out / "README.md"
    card.write_text(card.read_text().replace("Its words.", "My words."))
    lora_merge.merge(base, [(adapter, 0.5)], out, overwrite=True)
    assert card.read_text().endswith("My words.\n")
    assert card.read_text().count(BEGIN) == card.read_text().count("strength 0.5") == 1
    for text, options in ((card.read_text(), {"card": False}), ("---\n[1]\n---\nmine", {})):
        card.write_text(text)
        lora_merge.merge(base, adapter, out, overwrite=True, **options)  # type: ignore[arg-type]
        assert card.read_text() == text


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("of_base", "of_adapter", "wanted"),
    [
        ("license: mit", "license: MIT", {"license": "mit"}),
        ("license: openrail++", "license: CreativeML Open RAIL++-M License", {"license": "openrail++"}),
        ("license: mit", "license: apache-2.0", {"license": "other"}),
        ("license: mit", "tags: []", {"license": "other"}),
        ("tags: []", "license: mit", {"license": "other"}),
        ("tags: []", "tags: []", {}),
        ("license: My Own", "license: my own license", {"license": "other", "license_name": "my-own"}),
        ("license: other\nlicense_name: flux\nlicense_link: LICENSE", "license: other\nlicense_name: flux",
         {"license": "other", "license_name": "flux", "license_link": "LICENSE"}),
        ("license: other\nlicense_name: flux\nlicense_link: LICENSE", "license: mit", {"license": "other"}),
    ],
)  # fmt: skip
def test_licence_is_stated_where_all_inputs_agree_in_words_that_hubs_take(
    of_base: str, of_adapter: str, wanted: dict[str, str], inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    for folder, entries in zip(inputs, (of_base, of_adapter), strict=True):
        (folder / "README.md").write_text(f"---\n{entries}\n---\n")
    lora_merge.merge(*inputs, tmp_path / "out", verify=False)
    text = (tmp_path / "out" / "README.md").read_text()
    assert {name: value for name, value in front(text).items() if name.startswith("license")} == wanted
    assert ("Licences: " in text) == (of_base != of_adapter and wanted == {"license": "other"})


def test_base_without_a_card_gets_one(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    """A base that does not tell its own name on a hub has the one that its adapter was trained with."""
    config = json.loads((inputs[0] / "config.json").read_text())
    (inputs[0] / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "_name_or_path"}))
    lora_merge.merge(*inputs, tmp_path / "out", title="Ink")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "# Ink" in text
    assert front(text)["base_model"] == ["meta/named-by-peft", "peft"]
    assert "license" not in front(text)
    told = json.loads((inputs[1] / "adapter_config.json").read_text())
    (inputs[1] / "adapter_config.json").write_text(json.dumps(told | {"_name_or_path": "me/ink"}))
    lora_merge.merge(*inputs, tmp_path / "out", overwrite=True)
    assert front((tmp_path / "out" / "README.md").read_text())["base_model"] == ["meta/named-by-peft", "me/ink"]


@pytest.mark.few(1)
@pytest.mark.parametrize(("named", "wanted"), [
    ((["meta/own"], ["meta/own"]), "meta/own"), ((["meta/own"], ["a/b", "c/d"]), "meta/own"),
    ((["meta/own"], ["meta/b"]), "meta/b"), ((["meta/one"], ["meta/two"]), "b"), (([], []), "b"), ((["x" * 9], [{}]), "b"),
])  # fmt: skip
def test_cards_beside_files_name_the_base_and_the_licence(
    named: tuple[list[Any], list[Any]], wanted: str, tmp_path: Path
) -> None:
    """README.md of the folder of a file, if no other file of weights is there: it may be about that one. Where two
    adapters name two models, it is the one that is called as the base is."""
    base, out = save(sd1_sample(), tmp_path / "b.safetensors"), tmp_path / "o" / "o.safetensors"
    adapters = []
    for n, models in enumerate(named):
        (folder := tmp_path / f"{n}").mkdir()
        adapters.append(
            save(
                kohya(sd1_sample(), seed=n), folder / f"lora{n}.safetensors", {"modelspec.license": "mit"} if n else {}
            )
        )
        told = (
            {"base_model": models if n else "".join(models), "license": "apache-2.0"}
            if not n
            else {"base_model": models}
        )
        (folder / "README.md").write_text(f"---\n{yaml.safe_dump(told)}---\nWords.\n")
    lora_merge.merge(base, adapters, out, card=True, verify=False)
    text = out.with_suffix(".md").read_text()
    assert front(text)["base_model"] == [wanted, "lora0", "lora1"]
    assert "Licences: `b.safetensors`: not stated; `lora0.safetensors`: apache-2.0; `lora1.safetensors`: mit." in text
    save({"x": rand(2)}, tmp_path / "0" / "other.safetensors")
    lora_merge.merge(base, adapters, out, card=True, verify=False, overwrite=True)
    assert "`lora0.safetensors`: not stated" in out.with_suffix(".md").read_text()


def test_editing_a_card_is_no_change_of_the_model(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    """The proof stays true, and a batch does not make the output again; nor for another strength of the same plan."""
    jobs = [{"base": str(inputs[0]), "adapters": [{"path": str(inputs[1]), "strength": s}],
             "output": str(tmp_path / f"out{s}")} for s in (0.5, 0.75)]  # fmt: skip
    assert [r.status for r in lora_merge.run_batch(jobs)] == ["merged"] * 2
    assert "strength 0.75" in (tmp_path / "out0.75" / "README.md").read_text()
    (tmp_path / "out0.5" / "README.md").write_text("mine")
    assert [r.status for r in lora_merge.run_batch(jobs)] == ["skipped"] * 2
    assert lora_merge.verify(tmp_path / "out0.5")["warnings"] == []


@pytest.mark.parametrize("options", [{"card": False}, {"no_metadata": True}])
def test_no_card_if_it_is_switched_off(options: Any, inputs: tuple[Path, Path], tmp_path: Path) -> None:
    lora_merge.merge(*inputs, tmp_path / "out", **options)
    assert not (tmp_path / "out" / "README.md").exists()


@pytest.mark.few(1)
@pytest.mark.parametrize("text", ["---\n[1, 2]\n---\nx", "---\na: [\n---\nx", "---\n" + "[" * 3000 + "\n---\n"])
def test_card_that_cannot_be_read_stays_as_it_is(text: str, inputs: tuple[Path, Path], tmp_path: Path) -> None:
    (inputs[0] / "README.md").write_text(text)
    lora_merge.merge(*inputs, tmp_path / "out")
    assert (tmp_path / "out" / "README.md").read_text() == text


def test_file_gets_a_card_beside_it_on_request(tmp_path: Path) -> None:
    base = save(sd1_sample(), tmp_path / "b.safetensors", {"modelspec.license": "mit"})
    odd = save(kohya(sd1_sample()), tmp_path / "a <script>*.safetensors", {"modelspec.license": "MIT"})
    out, card = tmp_path / "o.safetensors", tmp_path / "o.md"
    lora_merge.merge(base, odd, out)
    assert not card.exists()
    card.write_text("my words\n")
    for strength in (0.5, 0.25):
        lora_merge.merge(base, [(odd, strength)], out, card=True, overwrite=True)
    text = card.read_text()
    assert front(text)["license"] == "mit"
    assert "Licences" not in text
    assert front(text)["base_model"] == ["b", "a <script>*"]
    assert text.endswith("my words\n")
    assert text.count("strength 0.25") == 1
    assert "<script>" not in text.partition(BEGIN)[2]
    assert "lora_merge.recipe" in metadata(out)
    card.write_bytes(b"\xff\xfe")
    report = lora_merge.merge(base, odd, out, card=True, overwrite=True)
    assert any("no model card" in note for note in report.notes)
    assert card.read_bytes() == b"\xff\xfe"


ODD = "\u202e\u2066\u200b\x1b[2J\x85\u2028\U000e0041\ufe0f"


def test_words_of_strangers_are_text_in_a_card(tmp_path: Path) -> None:
    """Licences, titles and names of files: no link, no entity, no table, nothing hidden."""
    licence = f"{ODD}[x](javascript:alert(1)) &#x202e; &lt;b&gt; | <img src=x> ![i](u) \\[x\\](y)"
    base = save(sd1_sample(), tmp_path / "b.safetensors", {"modelspec.license": "mit"})
    odd = save(kohya(sd1_sample()), tmp_path / f"a{ODD}`](u).safetensors", {"modelspec.license": licence})
    out = tmp_path / "o.safetensors"
    lora_merge.merge(base, odd, out, card=True, metadata={"modelspec.title": licence}, verify=False)
    text = out.with_suffix(".md").read_text()
    assert not {*ODD.replace("[2J", "")} & {*text}
    ours = text.partition(BEGIN)[2].partition(CARD_END)[0]
    for line in ours.replace("`lora-merge verify`", "").replace("`replay`", "").splitlines():
        plain = re.sub(r"`[^`]*`", "", line)  # Markdown interprets nothing in these
        assert not re.search(r"[\]\[<>&|`]", plain), line
    assert "\\u202e" in text
    yaml.safe_load(text.split("---")[1])


@pytest.mark.few(2)
@pytest.mark.parametrize(("words", "cards"), [((), [True, False, False]), (("--card",), [True, False, True]),
                                              (("--no-card",), [True, False, False])])  # fmt: skip
def test_batch_gives_cards_to_the_merges_that_ask_for_them(
    words: tuple[str, ...], cards: list[bool], tmp_path: Path
) -> None:
    """In the jobs file, and on the command line where the jobs file says nothing."""
    base, adapter = (
        save(sd1_sample(), tmp_path / "b.safetensors"),
        save(kohya(sd1_sample()), tmp_path / "a.safetensors"),
    )
    outputs = [tmp_path / f"{n}.safetensors" for n in range(3)]
    jobs = [
        {"base": str(base), "adapters": [str(adapter)], "output": str(out), "verify": False, **said}
        for out, said in zip(outputs, ({"card": True}, {"card": False}, {}), strict=True)
    ]
    (tmp_path / "jobs.yaml").write_text(json.dumps({"version": 1, "jobs": jobs}))
    assert run("batch", tmp_path / "jobs.yaml", *words).code == 0
    assert [out.with_suffix(".md").is_file() for out in outputs] == cards


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_entries_of_a_card_stay_as_they_are_written(mark: str, inputs: tuple[Path, Path], tmp_path: Path) -> None:
    """`no` is Norwegian to a hub and a truth value to others; comments are words too; a tag alone is a tag."""
    base, adapter = inputs
    theirs = "# ours\nlanguage: no  # norsk\nversion: 1.10\n"
    text = f"{mark}---\n{theirs}tags: llama\nlicense: mit\nwidget: 'x'\n---\nIts words.\n"
    (base / "README.md").write_text(text, encoding="utf-8")
    lora_merge.merge(base, adapter, tmp_path / "out")
    made = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    kept = f"---\n{theirs}tags:\n- llama\n- merge\n- lora-merge\nwidget: 'x'\n"
    assert made.startswith(kept)
    assert front(made)["tags"] == ["llama", "merge", "lora-merge"]
    assert made.count("---\n") == 2
    assert made.count("mit") == 1  # among the licences of the inputs
    lora_merge.merge(tmp_path / "out", adapter, tmp_path / "again")
    assert (tmp_path / "again" / "README.md").read_text(encoding="utf-8").startswith(kept)


@pytest.mark.parametrize("entries", ["{license: mit, widget: x}\n", "license: &a x\nwidget: *a\n"])
def test_entries_that_cannot_be_kept_by_the_letter_keep_their_meaning(
    entries: str, inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    base, adapter = inputs
    (base / "README.md").write_text(f"---\n{entries}---\nIts words.\n")
    lora_merge.merge(base, adapter, tmp_path / "out")
    assert front((tmp_path / "out" / "README.md").read_text())["widget"] == "x"
