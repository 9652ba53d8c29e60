"""Errors on every rank, forms, data-parallel stages, DTensors."""

from __future__ import annotations

import pytest

from tests.multiprocess.torch_api import edge_programs as work
from tests.support.process_pool import ProcessPool

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("what", ["dtype", "shape"])
@pytest.mark.parametrize("how", [work.fail_with_declared_form, work.fail_with_shown_form])
def test_a_changed_form_is_an_error_on_every_rank(
    two_ranks: ProcessPool, how: object, what: str
) -> None:
    for name, is_metadata_error, message in two_ranks.run(how, what):  # type: ignore[arg-type]
        assert name == "MetadataStepFailed"
        assert is_metadata_error
        assert f"{what} mismatch" in message
        assert "Stage 0" in message


@pytest.mark.parametrize("name", ["GPipe", "ZBVZeroBubble"])
def test_a_failure_reaches_every_rank(two_ranks: ProcessPool, name: str) -> None:
    for kind, _, message in two_ranks.run(work.fail_in_forward, name):
        assert kind == "StepFailed"
        assert "0F0" in message
        assert "the stage broke" in message


def test_a_missing_target_is_an_error_on_every_rank(two_ranks: ProcessPool) -> None:
    for _, _, message in two_ranks.run(work.forget_target):
        assert "the loss needs a target" in message


def test_misuse_is_refused_before_anything_runs(two_ranks: ProcessPool) -> None:
    assert two_ranks.run(work.misuse) == [[], []]


def test_wrong_stages_are_an_error_on_every_rank(two_ranks: ProcessPool) -> None:
    for kind, _, message in two_ranks.run(work.wrong_stages):
        assert kind == "ScheduleError"
        assert "[[1], [0]]" in message


def test_chunk_specs_and_keywords_of_the_loss(two_ranks: ProcessPool) -> None:
    assert two_ranks.run(work.chunk_specs) == [[], []]


def test_modules_and_loss_are_reassigned(two_ranks: ProcessPool) -> None:
    assert two_ranks.run(work.reassigned_modules) == [[], []]


def test_forward_only(two_ranks: ProcessPool) -> None:
    assert two_ranks.run(work.forward_only) == [[], []]


def test_outputs_are_kept_only_where_they_are_wanted(two_ranks: ProcessPool) -> None:
    assert two_ranks.run(work.outputs_are_dropped) == [(0, 0), (0, 4)]


def test_profiles_show_torchs_names(two_ranks: ProcessPool) -> None:
    shown = two_ranks.run(work.profile, "DualPipeV")
    assert {"PP:0F0", "PP:0SEND_F0", "PP:3B7"} <= shown[0]
    assert any(name.startswith("PP:(") for name in shown[0])


@pytest.mark.parametrize("how", ["fsdp", "ddp"])
@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_data_parallel_stages(four_ranks: ProcessPool, name: str, how: str) -> None:
    assert four_ranks.run(work.train_data_parallel, name, how) == [[]] * 4


def test_sharding_by_hand(four_ranks: ProcessPool) -> None:
    assert four_ranks.run(work.train_data_parallel, "ZBVZeroBubble", "fsdp", True) == [[]] * 4


def test_dtensors_cross_boundaries(four_ranks: ProcessPool) -> None:
    assert four_ranks.run(work.dtensor_boundary, True) == [[]] * 4


def test_an_unknown_mesh_names_the_remedy(four_ranks: ProcessPool) -> None:
    for _, is_metadata_error, message in four_ranks.run(work.dtensor_boundary, False):
        assert is_metadata_error
        assert "get_mesh" in message


def test_two_schedules_of_one_stage(two_ranks: ProcessPool) -> None:
    assert two_ranks.run(work.two_schedules_of_one_stage) == [[], []]


def test_arguments_that_want_gradients(two_ranks: ProcessPool) -> None:
    assert two_ranks.run(work.arguments_that_want_gradients) == [[], []]


def test_several_values_between_stages(two_ranks: ProcessPool) -> None:
    assert two_ranks.run(work.several_values) == [[], []]
