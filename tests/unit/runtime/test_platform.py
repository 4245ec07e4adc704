import inspect

import pytest
import torch

from megatron.runtime import platform
from megatron.runtime.platform import REPLACEMENTS, Replacement


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> type:
    """A class of this module as the only thing to replace, in a process where nothing was replaced yet."""

    class Target:
        value = "original"

    monkeypatch.setattr(platform, "Target", Target, raising=False)
    monkeypatch.setattr(platform, "_installed", False)
    row = Replacement("megatron.runtime.platform:Target.value", lambda original: f"in place of {original}", "a test")
    monkeypatch.setattr(platform, "REPLACEMENTS", (row,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return Target


def test_install_replaces_once(target):
    platform.install()
    platform.install()
    assert target.value == "in place of original"


def test_nothing_is_replaced_with_cuda(target, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    platform.install()
    assert target.value == "original"


def test_what_is_imported_meanwhile_is_not_compiled(target, monkeypatch, tmp_path):
    body = "import torch\nclass Made:\n    plain = torch.compile(len)\n    with_options = torch.compile(dynamic=True)(len)\n"
    (tmp_path / "compiles_at_import.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    before, found = torch.compile, []
    rows = [Replacement(f"compiles_at_import:Made.{name}", found.append, "a test") for name in ("plain", "with_options")]
    monkeypatch.setattr(platform, "REPLACEMENTS", rows)
    platform.install()
    assert found == [len, len] and torch.compile is before


@pytest.mark.parametrize(
    "missing",
    [
        "megatron.core.no_such_module:torch",
        "megatron.core.optimizer.optimizer:no_such_name",
        "torch:Tensor.no_such_method",
        "torch:no_such_class.method",
    ],
)
def test_a_target_that_is_gone_is_named_and_nothing_else_is_replaced(target, monkeypatch, missing):
    gone = Replacement(missing, lambda original: None, "a test")
    monkeypatch.setattr(platform, "REPLACEMENTS", (*platform.REPLACEMENTS, gone))
    with pytest.raises(RuntimeError, match=f"megatron-core has no {missing} any more.*install megatron-core 0.16.1, or adapt"):
        platform.install()
    assert target.value == "original"


def test_every_target_exists_in_the_installed_megatron_core_and_has_a_reason():
    assert len({replacement.target for replacement in REPLACEMENTS}) == len(REPLACEMENTS)
    for replacement in REPLACEMENTS:
        assert replacement.target.startswith(("megatron.core.", "torch."))
        owner, name = platform._resolve(replacement.target)
        assert hasattr(owner, name) and replacement.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("num_rotated", [8, 4])
def test_rotation_gives_megatrons_bits(dtype, num_rotated):
    owner, name = platform._resolve("megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_bshd")
    original = inspect.unwrap(getattr(owner, name))
    draw = torch.Generator().manual_seed(1)
    stacked, gradient = (torch.randn(6, 1, 3, size, generator=draw).to(dtype) for size in (24, 8))
    angles, found = 9 * torch.randn(6, 1, 1, num_rotated, generator=draw), []
    for rotate in (original, platform._with_fewer_copies(original)):
        leaf = stacked.clone().requires_grad_()
        rotated = rotate(rotate(leaf[..., :8], angles, rotary_interleaved=False), angles, mscale=1.0)
        rotated.backward(gradient)
        found.append((rotated, leaf.grad))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
