"""The initial checkpoint: found or built, cached once, loaded as it was saved; and its character tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from streamrl.errors import ConfigError
from streamrl.policy.model import load_model, load_tokenizer, prepare_model
from streamrl.policy.tokenizer import CHARACTERS, character_tokenizer
from streamrl.policy.warmup import FIRST_PROBE, Lesson
from streamrl.schema import Config

torch.set_num_threads(1)

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, and a hub that cannot be reached."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "cache" / "streamrl" / "models"


def small_config(steps: int = 0, **args: object) -> Config:
    config = Config()
    config.model.args = {**SMALL, **args}
    config.model.max_length = 32
    config.model.warmup.steps = steps
    config.model.warmup.batch = 2
    return config


def echo(index: int) -> Lesson:
    return [(f"{index % 7}=", False), (str(index % 7), True)]


def silent(done: int, total: int, text: str) -> None:
    pass


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_model(folder, "float32").state_dict()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_text_of_the_alphabet_survives_encoding_one_token_per_character():
    tokenizer = character_tokenizer()
    text = "  a\n\n\nb , c's . ( 12+3= )\n<eos>" + CHARACTERS
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert sorted(tokenizer.encode(CHARACTERS)) == list(range(8, 104))


def test_a_character_outside_the_alphabet_becomes_unk_and_is_not_dropped():
    tokenizer = character_tokenizer()
    ids = tokenizer.encode("a\té→b")
    assert [ids[1], ids[2], ids[3]] == [tokenizer.unk_token_id] * 3
    assert len(ids) == 5


def test_a_chat_is_one_token_per_role_and_the_end_token_after_each_message():
    tokenizer = character_tokenizer()
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {}, "b": {}}}}}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": "4"}}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "3+4"},
        {"role": "assistant", "tool_calls": [call, call]},
        {"role": "tool", "content": "7"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|system|>S\nadd(a,b)<eos><|user|>3+4<eos>"
        '<|assistant|><|call|>add(a=3,b="4")<|call|>add(a=3,b="4")<eos><|tool|>7<eos><|assistant|>'
    )
    without_system = tokenizer.apply_chat_template(messages[1:2], tools=tools, tokenize=False)
    assert without_system == "<|system|>add(a,b)<eos><|user|>3+4<eos>"
    ids = tokenizer.encode("<|user|>3<eos>", split_special_tokens=False)
    assert (ids, len(tokenizer)) == ([4, tokenizer.convert_tokens_to_ids("3"), 1], 104)


def test_special_tokens_are_left_out_of_a_decoded_answer():
    tokenizer = character_tokenizer()
    ids = [*tokenizer.encode("46"), tokenizer.eos_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "46"
    assert tokenizer.decode(ids) == "46<eos>"


def test_the_saved_tokenizer_reads_as_the_one_that_was_built():
    folder = prepare_model(small_config(), None, silent)
    loaded, built = load_tokenizer(folder), character_tokenizer()
    text = "12 + 3=\n\n?é<eos>"
    assert loaded.encode(text) == built.encode(text)
    assert (loaded.eos_token_id, loaded.pad_token_id) == (built.eos_token_id, built.pad_token_id) == (1, 0)


def test_a_built_model_has_the_fields_asked_for_and_the_tokenizers_vocabulary():
    model = load_model(prepare_model(small_config(hidden_size=24, tie_word_embeddings=True), None, silent), "bfloat16")
    assert model.config.model_type == "qwen3"
    assert model.get_input_embeddings().weight.shape == (104, 24)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.config.eos_token_id == character_tokenizer().eos_token_id
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not model.training


def test_the_default_model_has_between_one_and_three_million_parameters():
    folder = prepare_model(Config(), None, silent)
    assert 1e6 < sum(parameter.numel() for parameter in load_model(folder, "float32").parameters()) < 3e6


def test_the_second_launch_takes_the_model_from_the_cache(cache: Path):
    seen: list[str] = []
    first = prepare_model(small_config(steps=2), echo, silent)
    before = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    second = prepare_model(small_config(steps=2), echo, lambda done, total, text: seen.append(text))
    assert second == first == next(cache.iterdir())
    assert {path: path.stat().st_mtime_ns for path in first.iterdir()} == before
    assert seen == [f"warmed-up model found in {first}"]


def test_everything_that_determines_the_model_makes_another_key():
    def other_answers(index: int) -> Lesson:
        return [(f"{index % 7}=", False), ("7", True)]

    changes = [small_config(steps=2) for _ in range(5)]
    changes[0].seed = 1
    changes[1].model.warmup.lr = 5e-4
    changes[2].model.args["hidden_size"] = 24
    changes[3].env.args = {"level": 2}
    changes[4].model.warmup.steps = 3
    folders = [prepare_model(config, echo, silent) for config in [small_config(steps=2), *changes]]
    folders.append(prepare_model(small_config(steps=2), other_answers, silent))
    assert len(set(folders)) == len(folders)


def test_a_model_with_another_tokenizer_is_another_model(monkeypatch: pytest.MonkeyPatch):
    before = prepare_model(small_config(), None, silent)
    changed = character_tokenizer()
    changed.chat_template = f"{changed.chat_template} "
    monkeypatch.setattr("streamrl.policy.model.character_tokenizer", lambda: changed)
    assert prepare_model(small_config(), None, silent) != before


def test_the_same_seed_builds_the_same_weights_and_another_seed_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def built(name: str, seed: int) -> dict[str, torch.Tensor]:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        config = small_config(steps=3)
        config.seed = seed
        torch.rand(seed + 1)  # the global generator stands elsewhere each time
        return weights(prepare_model(config, echo, silent))

    first, again, other = built("a", 0), built("b", 0), built("c", 1)
    assert same(first, again)
    assert not same(first, other)


def test_building_leaves_the_global_random_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    prepare_model(small_config(steps=2), echo, silent)
    assert torch.equal(torch.rand(3), expected)


def test_the_launch_that_is_second_to_finish_takes_the_first_ones_model(cache: Path):
    """Another launch finishes while this one warms up: this one's work is dropped, nothing is left aside."""
    inner: list[Path] = []

    def while_building(done: int, total: int, text: str) -> None:
        if not inner:
            inner.append(prepare_model(small_config(steps=5), echo, lambda *_: None))

    outer = prepare_model(small_config(steps=5), echo, while_building)
    assert inner == [outer]
    assert list(cache.iterdir()) == [outer]
    assert len(weights(outer)) > 0


def test_a_build_that_fails_leaves_nothing_in_the_cache(cache: Path):
    def broken(index: int) -> Lesson:
        if index > FIRST_PROBE:
            raise RuntimeError("no such task")
        return [("1=", False), ("1", True)]

    with pytest.raises(RuntimeError, match="no such task"):
        prepare_model(small_config(steps=2), broken, silent)
    assert list(cache.iterdir()) == []


def test_without_the_cache_every_launch_builds_its_own(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    config = small_config()
    config.model.cache = False
    first, second = prepare_model(config, None, silent), prepare_model(config, None, silent)
    assert first != second
    assert same(weights(first), weights(second))
    assert not cache.exists()


def test_a_cache_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(
        ConfigError, match=r"cannot keep built models there .*; set XDG_CACHE_HOME or model.cache=false"
    ):
        prepare_model(small_config(), None, silent)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"hiden_size": 8}, r"^model.args.hiden_size: Qwen3's config has no such field; did you mean 'hidden_size'\?$"),
        ({"vocab_size": 8}, r"^model.args.vocab_size: the built tokenizer determines it; leave it out$"),
        ({"hidden_size": "wide"}, r"^model.args: .*hidden_size.*expected int, got str.*$"),
        ({"num_attention_heads": 2, "num_key_value_heads": 0}, r"^model.args: "),
    ],
)
def test_model_args_that_cannot_be_used_are_refused_in_one_line(args: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message) as raised:
        prepare_model(small_config(**args), None, silent)
    assert "\n" not in str(raised.value)


def test_a_warm_up_without_tasks_is_refused():
    with pytest.raises(ConfigError, match=r"model.warmup.steps=2: the environment has no tasks to warm up on"):
        prepare_model(small_config(steps=2), None, silent)


def test_a_folder_with_a_checkpoint_is_taken_as_it_is():
    built = prepare_model(small_config(), None, silent)
    config = Config()
    config.model.name = str(built)
    assert prepare_model(config, None, silent) == built


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "no config.json in it, so it is not a transformers checkpoint"),
        ("model.safetensors", r"no \*.safetensors in it"),
        ("tokenizer*", "no tokenizer in it"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_refused_by_what_it_lacks(missing: str, message: str):
    folder = prepare_model(small_config(), None, silent)
    for path in folder.glob(missing):
        path.unlink()
    config = Config()
    config.model.name = str(folder)
    with pytest.raises(ConfigError, match=message):
        prepare_model(config, None, silent)


def test_a_folder_whose_config_describes_no_model_is_refused(tmp_path: Path):
    config = Config()
    config.model.name = str(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(ConfigError, match="config.json has no model_type"):
        prepare_model(config, None, silent)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json cannot be read"):
        prepare_model(config, None, silent)


def test_a_name_that_neither_exists_here_nor_can_be_fetched_is_one_line():
    config = Config()
    config.model.name = "tiny-qwen4"
    with pytest.raises(
        ConfigError, match=r"^model.name=tiny-qwen4: no such folder, not the built-in 'tiny-qwen3', and the hub did not"
    ):
        prepare_model(config, None, silent)


def test_a_cuda_device_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="engine.device=cuda:1: found 1 CUDA devices; set engine.device=cpu"):
        load_model(tmp_path, "float32", "cuda:1")
