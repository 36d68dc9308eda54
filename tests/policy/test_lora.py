"""Adapters are trained as the merged weights W + alpha/rank · B·A would be; the base stays as it was."""

import sys

import pytest
import torch
from learner_cases import VOCAB, batch, group, settings, tiny_model, trajectory, varied_groups
from lora_cases import RANK, SCALE, adapted_model, lora_settings, merged_model
from torch.optim.optimizer import register_optimizer_step_pre_hook

from streamrl.config import load_config
from streamrl.errors import ConfigError
from streamrl.lora import PREFIX, adapted, adapter_parameters, adapter_shapes, peft_config_json, without_adapters
from streamrl.lora_schema import LoraConfig
from streamrl.policy.learner import Learner
from streamrl.policy.trained import as_sent, load_served, load_trained, sent_parameters

ROW = trajectory("abcdef", "ghij").tokens


def frozen(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}


def gradients_of_a_step(learner: Learner, parameters) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    handle = register_optimizer_step_pre_hook(
        lambda *_: found.update({name: parameter.grad.clone() for name, parameter in parameters.items()})
    )
    learner.step(batch(varied_groups()))
    handle.remove()
    return found


@pytest.fixture
def folder(tmp_path):
    tiny_model(tied=False).save_pretrained(tmp_path)
    return tmp_path


# Which layers, what names ---------------------------------------------------------------------------------------------


def test_names_are_those_of_a_peft_checkpoint():
    from peft import get_peft_model_state_dict

    model = adapted_model(lora_settings())
    by_peft = get_peft_model_state_dict(model)
    assert {PREFIX + name for name in by_peft} == set(adapter_parameters(model))
    for name, tensor in by_peft.items():
        assert torch.equal(tensor, adapter_parameters(model)[PREFIX + name])


def test_peft_reads_what_travels_and_computes_the_same(folder):
    from peft import PeftConfig, PeftModel, set_peft_model_state_dict

    config = lora_settings(["q_proj", "down_proj"])
    ours = adapted_model(config, tied=False)
    described = PeftConfig.from_peft_type(**peft_config_json(config.model.lora, str(folder)))
    theirs = PeftModel(tiny_model(tied=False), described)
    unknown = set_peft_model_state_dict(theirs, dict(adapter_parameters(ours))).unexpected_keys
    assert unknown == []
    ids = torch.tensor(ROW)[None].long()
    torch.testing.assert_close(theirs(input_ids=ids).logits, ours(input_ids=ids).logits)


def test_every_linear_layer_of_the_blocks_is_adapted_and_nothing_else():
    names = adapter_parameters(adapted_model(lora_settings(), tied=False))
    layers = {name.removeprefix(PREFIX).rsplit(".", 2)[0] for name in names}
    linear = {n for n, module in tiny_model(tied=False).named_modules() if isinstance(module, torch.nn.Linear)}
    assert layers == linear - {"lm_head"}
    assert len(names) == 2 * len(layers)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["mlp.up_proj"], ["0.self_attn.o_proj"]])
def test_targets_are_ends_of_layer_names(targets):
    names = adapter_parameters(adapted_model(lora_settings(targets)))
    layers = {name.removeprefix(PREFIX).rsplit(".", 2)[0] for name in names}
    every = {name for name, _ in tiny_model().named_modules()}
    assert layers == {name for name in every if any(name.endswith(f".{target}") for target in targets)}


@pytest.mark.parametrize("target", ["query", "lm_head", "_proj", "mlp", "q_norm"])
def test_a_target_that_is_no_linear_layer_of_a_block_is_refused_with_those_that_are(target):
    with pytest.raises(ConfigError, match="q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj") as refused:
        adapted(tiny_model(tied=False), LoraConfig(RANK, targets=["q_proj", target]), 0, torch.float32)
    assert repr(target) in str(refused.value) and "\n" not in str(refused.value)


def test_shapes_are_known_without_weights_and_without_peft(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    found = adapter_shapes(str(folder), LoraConfig(RANK), "bfloat16")
    monkeypatch.undo()
    expected = adapter_parameters(adapted_model(lora_settings(), tied=False))
    assert [(name, tensor.shape) for name, tensor in found.items()] == [(n, p.shape) for n, p in expected.items()]
    assert {(tensor.dtype, tensor.device.type) for tensor in found.values()} == {(torch.bfloat16, "meta")}
    assert tuple(found[f"{PREFIX}model.layers.1.mlp.down_proj.lora_A.weight"].shape) == (RANK, 48)
    assert tuple(found[f"{PREFIX}model.layers.1.mlp.down_proj.lora_B.weight"].shape) == (32, RANK)


def test_without_peft_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"model\.lora\.rank=4 needs peft: pip install 'streamrl\[lora\]'"):
        adapted(tiny_model(), LoraConfig(RANK), 0, torch.float32)


# At the start ---------------------------------------------------------------------------------------------------------


def test_at_the_start_the_model_computes_what_it_did_before():
    scores = Learner(lora_settings(), adapted_model(lora_settings(), trained=False)).score(ROW)
    assert (scores == Learner(settings(), tiny_model()).score(ROW)).all()


def test_adapters_follow_from_the_seed_alone_whatever_was_drawn_before():
    one, other, third = (
        adapter_parameters(adapted(tiny_model(seed=model), LoraConfig(RANK), seed, torch.float32))
        for model, seed in ((0, 3), (1, 3), (0, 4))
    )
    for name, parameter in one.items():
        assert torch.equal(parameter, other[name]), name
        assert torch.equal(parameter, third[name]) == name.endswith("lora_B.weight"), name


def test_a_run_loads_the_base_in_its_dtype_and_what_it_trains_in_float32(folder):
    config = lora_settings()
    config.model.dtype = "bfloat16"
    model = load_trained(config, folder)
    assert {p.dtype for p in sent_parameters(model).values()} == {torch.float32}
    assert {tensor.dtype for tensor in frozen(model).values()} == {torch.bfloat16}
    assert {(name, tensor.dtype) for name, tensor in as_sent(model, "bfloat16")} == {
        (name, torch.bfloat16) for name in adapter_parameters(model)
    }
    assert {p.dtype for p in load_served(config, folder).parameters()} == {torch.bfloat16}


# Training -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_log_probs_are_those_of_the_merged_weights(tied):
    model = adapted_model(lora_settings(), tied)
    scores = torch.tensor(Learner(lora_settings(), model).score(ROW, 0.7))
    expected = torch.tensor(Learner(settings(), merged_model(model, tied)).score(ROW, 0.7))
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    base = torch.tensor(Learner(settings(), tiny_model(tied)).score(ROW, 0.7))
    assert (scores - base).abs().max() > 0.1


def test_gradients_follow_from_those_of_the_merged_weights():
    """W' = W + s·B·A, so that ∂/∂A = s·Bᵀ·∂/∂W' and ∂/∂B = s·∂/∂W'·Aᵀ."""
    model = adapted_model(lora_settings())
    merged = merged_model(model)
    adapters = adapter_parameters(model)
    before = {name: parameter.detach().clone() for name, parameter in adapters.items()}
    found = gradients_of_a_step(Learner(lora_settings(), model), adapters)
    whole = gradients_of_a_step(Learner(settings(), merged), dict(merged.named_parameters()))
    for name in before:
        if name.endswith("lora_B.weight"):
            continue
        other = name.replace("lora_A", "lora_B")
        of_weight = whole[name.removeprefix(PREFIX).replace("lora_A.", "")]
        for own, expected in (
            (found[name], SCALE * before[other].T @ of_weight),
            (found[other], SCALE * of_weight @ before[name].T),
        ):
            assert (own - expected).norm() < 1e-4 * expected.norm(), name


def test_steps_move_every_adapter_and_leave_the_base_to_the_bit():
    model = adapted_model(lora_settings(), trained=False)
    base = frozen(model)
    before = {name: p.detach().clone() for name, p in adapter_parameters(model).items()}
    learner = Learner(lora_settings(), model)
    for version in (5, 6):
        learner.step(batch(varied_groups(), version=version))
    assert all(torch.equal(tensor, base[name]) for name, tensor in frozen(model).items())
    assert not any(torch.equal(p, before[name]) for name, p in adapter_parameters(model).items())


def test_the_optimizer_holds_adapters_alone():
    model = adapted_model(lora_settings())
    learner = Learner(lora_settings(), model)
    learner.step(batch(varied_groups()))
    assert {id(p) for p in learner.optimizer.state} == {id(p) for p in adapter_parameters(model).values()}


def test_a_value_head_is_trained_with_the_adapters():
    config = lora_settings()
    config.loss = load_config(None, ["loss=sapo", "loss.advantage=gae"]).loss
    learner = Learner(config, adapted_model(config))
    learner.step(batch(varied_groups()))
    trained = {tuple(p.shape) for p in learner.optimizer.state if p.shape[-1:] in ((1,),) or p.shape == (1, 32)}
    assert trained == {(1, 32), (1,)}
    assert all(parameter.abs().sum() > 0 for parameter in learner.optimizer.state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_is_the_base_without_a_copy_of_it(folder, dtype):
    """The same numbers as a frozen copy of the checkpoint gives."""
    found = []
    for reference in ("initial", str(folder)):
        config = lora_settings()
        config.model.dtype = dtype
        config.loss = load_config(None, ["loss=gspo", "loss.kl.coefficient=0.1", f"loss.kl.reference={reference}"]).loss
        model = load_trained(config, folder)
        learner = Learner(config, model)
        for version in (5, 6):
            metrics = learner.step(batch(varied_groups(), version=version))
        found.append({name: value for name, value in metrics.items() if not name.startswith("time/")})
    assert found[0] == found[1]
    assert found[0]["policy/kl_k3"] != 0


def test_without_its_adapters_a_model_is_its_base_and_gets_them_back():
    model, ids = adapted_model(lora_settings()), torch.arange(VOCAB)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        with pytest.raises(ZeroDivisionError), without_adapters(model):
            assert torch.equal(model(input_ids=ids).logits, tiny_model()(input_ids=ids).logits)
            raise ZeroDivisionError
        assert torch.equal(model(input_ids=ids).logits, before)


def test_low_precision_rounds_adapters_as_they_are_sent_and_keeps_small_steps():
    config = lora_settings(lr=1e-5)
    config.model.dtype = "bfloat16"
    model = adapted_model(config)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    learner = Learner(config, model)
    masters = {name: p.detach().clone() for name, p in adapter_parameters(model).items()}
    sent = {name: tensor.clone() for name, tensor in learner.full_parameters()}
    learner.step(batch([group(trajectory("ab", "cd"), trajectory("ab", "ce"))]))
    moved = [not torch.equal(p, masters[name]) for name, p in adapter_parameters(model).items()]
    assert all(moved)
    assert {tensor.dtype for tensor in sent.values()} == {torch.bfloat16}
    same = torch.cat([(tensor == sent[name]).flatten() for name, tensor in learner.full_parameters()])
    assert same.float().mean() > 0.5
