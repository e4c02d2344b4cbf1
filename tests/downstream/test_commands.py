"""The frameworks' own commands, unmodified, with one line of ours and without: every loss and parameter is eager's.

A name that doesn't exist, a kernel that isn't here and a model that no flash kernel computes end them before they train.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from framework_commands import COMMANDS, Command, Finished, Place
from framework_script import STEPS

NAME = "kernel_compat_flash_attention_reference"

INSTALLED = [name for name, command in COMMANDS.items() if command.installed]
if not INSTALLED:
    pytest.skip("none of the frameworks is installed", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1300)]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(params=INSTALLED)
def command(request: pytest.FixtureRequest) -> Command:
    return COMMANDS[request.param]


@pytest.fixture(params={name.split()[0]: name for name in reversed(INSTALLED)}.values())
def first(request: pytest.FixtureRequest) -> Command:
    """The first command of each framework."""
    return COMMANDS[request.param]


def test_every_loss_is_eager_s(command: Command, shared: Path, tmp_path: Path) -> None:
    """Float32: sums in another order, which training amplifies from step to step."""
    model = Place(shared, tmp_path).model
    eager = command.run(model, command.eager, Place(shared, tmp_path / "eager"), ours=())
    ours = command.run(model, NAME, Place(shared, tmp_path / "ours"))
    for finished in (eager, ours):
        assert finished.code == 0, finished.log[-5000:]
        assert len(finished.losses) == STEPS, finished.log[-5000:]
        assert finished.checkpoints
    assert eager.losses.unique().numel() > 1
    torch.testing.assert_close(ours.losses, eager.losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.parameters, eager.parameters, rtol=1e-4, atol=1e-5)


def require_nothing_trained(finished: Finished, *message: str) -> None:
    assert finished.code != 0, finished.log[-5000:]
    assert not finished.losses.numel()
    assert not finished.checkpoints
    for words in message:
        assert words in finished.log, finished.log[-5000:]


def test_a_name_that_does_not_exist(first: Command, shared: Path, tmp_path: Path) -> None:
    bad = NAME.removesuffix("ence")
    require_nothing_trained(first.run(Place(shared, tmp_path).model, bad, Place(shared, tmp_path / "bad")), bad)


def test_a_kernel_that_is_not_here(first: Command, shared: Path, tmp_path: Path) -> None:
    missing = "kernel_compat_flash_attention_3"
    finished = first.run(Place(shared, tmp_path).model, missing, Place(shared, tmp_path / "missing"))
    require_nothing_trained(finished, "KernelUnavailableError", "flash-attn-3")


def test_a_model_that_is_refused(first: Command, shared: Path, tmp_path: Path) -> None:
    finished = first.run(Place(shared, tmp_path).refused, NAME, Place(shared, tmp_path / "refused"))
    require_nothing_trained(finished, "AttentionRefusedError", "each query chooses its keys")
