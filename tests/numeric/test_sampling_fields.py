"""Every number of ``SamplingParams`` gets to where it acts: into step rows, or to the scheduler."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weft.core.plan import RowAdd, StepPlan, SubBatch
from weft.core.types import NUMBERS, SamplingParams
from weft.exec.device import HostDevice
from weft.exec.device_rows import DeviceRows
from weft.exec.input_batch import InputBatch
from weft.exec.step_packer import StepPacker
from weft.kernels.cpu import _native
from weft.kernels.sampling import PENALISED, PENALTIES, SETTINGS

SCHEDULED = {"max_tokens", "min_tokens", "ignore_eos", "speculation"}
SCORED = {"logprobs", "prompt_logprobs"}
OF_TEXT = {"include_stop", "skip_special_tokens"}
NEUTRAL = SamplingParams(seed=0).with_defaults({})


def changed(name: str) -> SamplingParams:
    """The neutral parameters but for one, which float32 can hold."""
    declared = NUMBERS[name]
    value = declared.low + 0.25 if declared.kind == "float" else 7
    return SamplingParams(**{"seed": 0, name: value}).with_defaults({})


def table_with(*rows: SamplingParams) -> InputBatch:
    table = InputBatch(len(rows), 16, [4])
    adds = (RowAdd(i, i, (1, 2, 3), 3, row, frozenset(), ((i,),)) for i, row in enumerate(rows))
    table.apply(StepPlan(1, (), add=tuple(adds)))
    return table


def test_every_number_has_a_place():
    """A new one: name it in ``SETTINGS`` or ``PENALTIES``, or here if it is no matter of rows."""
    placed = [*SETTINGS, *PENALTIES, "seed", *SCHEDULED, *SCORED, *OF_TEXT]
    assert sorted(placed) == sorted(NUMBERS)
    assert _native.SETTINGS == SETTINGS


@pytest.mark.parametrize("name", [*SETTINGS, "seed"])
def test_each_setting_is_uploaded_with_a_step(name):
    table = table_with(NEUTRAL, changed(name))
    packer = StepPacker(table, 4, (None,), HostDevice(), 8, (1, 2, 4, 8))
    packed = packer.pack(SubBatch((0, 1), (2, 2), (1, 1), (True, True)))
    parts = packed.sample.views(packer.buffers[packed.buffer], packed.words.start)
    columns = torch.column_stack((parts["settings"], parts["seed"]))[:2].numpy()
    names = (*SETTINGS, "seed")
    wanted = np.array([[getattr(row, n) for n in names] for row in (NEUTRAL, changed(name))])
    assert (columns == wanted).all()
    assert [n for n, same in zip(names, columns[0] == columns[1], strict=True) if not same] == [
        name
    ]


@pytest.mark.parametrize("name", PENALTIES)
def test_each_penalty_reaches_the_state_of_its_row(name):
    table = table_with(NEUTRAL, changed(name))
    rows = DeviceRows(table, 50, HostDevice())
    for row in range(2):
        rows.add_row(row)
    assert table.columns.changes.tolist() == [0, PENALISED]
    penalties = rows.state.asked[1, : len(PENALTIES)].view(torch.float32).tolist()
    assert penalties == [getattr(changed(name), n) for n in PENALTIES]
    assert table.columns.penalties[1].tolist() == penalties
