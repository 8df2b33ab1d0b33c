"""Guarantees of a device that executors need: order, captured work, copies, and KV on the host."""

from __future__ import annotations

import threading

import pytest
import torch
from served import DEVICE
from torch import Tensor

import where
from weft.core.errors import InvariantError
from weft.core.plan import KVMove, Tier
from weft.exec.device import CudaDevice, HostDevice, tensor_memory
from weft.exec.device_tier import device_tier
from weft.exec.store import KVStore
from weft.kernels.arrays import dtype_name
from weft.kernels.block_arrays import BlockArrays
from weft.models.spec import KVGroup


@pytest.fixture
def device():
    return CudaDevice(torch.device("cuda", 0)) if where.ON_GPU else HostDevice()


def test_captured_work_reads_what_was_uploaded_before_each_replay(device) -> None:
    sources = [device.host_memory(1000, torch.int64) for _ in range(5)]
    targets = [device.host_memory(1000, torch.int64) for _ in range(5)]
    uploaded, doubled = torch.zeros(2, 1000, dtype=torch.int64, device=device.where)
    runs = torch.zeros(1, dtype=torch.int64, device=device.where)
    device.synchronize()

    def body() -> None:
        doubled.copy_(torch.where(uploaded < 0, 0, uploaded) * 2)
        runs.add_(1)

    replay = device.capture(body)
    device.synchronize()
    before, events = int(runs), []
    with device.work():
        for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
            source.copy_(torch.arange(1000) + number)
            device.upload(source, uploaded)
            replay()
            device.download(doubled, target)
            events.append(device.record())
    for number, (event, target) in enumerate(zip(events, targets, strict=True)):
        event.wait()
        assert torch.equal(target, 2 * (torch.arange(1000) + number))
    device.synchronize()
    assert int(runs) == before + 5


def test_several_captured_functions_share_their_memory(device) -> None:
    """Replayed in any order, the large one between the small ones."""
    x = torch.ones(4096, device=device.where)
    out = {size: torch.zeros(size, device=device.where) for size in (4096, 64, 7)}
    device.synchronize()

    def body(size: int) -> None:
        parts = [x[:size] * factor for factor in range(6)]
        out[size].copy_(sum(parts[1:], parts[0]))

    replays = {size: device.capture(lambda size=size: body(size)) for size in out}
    with device.work():
        for size in (7, 4096, 64, 7, 64, 4096):
            x.add_(1.0)
            replays[size]()
    device.synchronize()
    assert [float(out[size][0]) for size in (4096, 64, 7)] == [7 * 15.0, 6 * 15.0, 5 * 15.0]


def test_forks_run_beside_what_follows_and_one_after_the_other(device) -> None:
    """Captured, and not; what each reads may change once the next one has begun."""
    out = [device.exchange_memory(1000, torch.int64) for _ in range(3)]
    x = torch.zeros(1000, dtype=torch.int64, device=device.where)
    parts = [torch.zeros_like(x) for _ in range(2)]
    device.synchronize()

    def body() -> None:
        for number, target in enumerate(out):
            part = parts[number % 2]
            x.add_(1)
            part.copy_(x)
            with device.fork():
                target.copy_(part, non_blocking=True)
            x.mul_(2)
        device.rejoin()
        for part in parts:
            part.fill_(-1)

    replay = device.capture(body)
    for run in (replay, body, replay):
        x.zero_()
        device.synchronize()
        with device.work():
            run()
        device.synchronize()
        assert [set(target.tolist()) for target in out] == [{1}, {3}, {7}]


def test_branches_run_beside_what_follows_and_are_joined_one_by_one(device) -> None:
    """Captured, and not; two are open at a time, and later ones get the memory of earlier ones."""
    x = torch.zeros(1 << 16, dtype=torch.int64, device=device.where)
    found = torch.zeros(6, dtype=torch.int64, device=device.where)
    device.synchronize()

    def body() -> None:
        open_ = []
        for number in range(6):
            x.add_(1)
            part = x * 2  # memory of the branch alone until it is joined
            open_.append(device.branch(lambda part=part: part + 1))
            del part
            if number:
                first = open_.pop(0).join()
                found[number - 1].copy_(first[7])
                torch.full_like(x, -5)
        found[5].copy_(open_.pop().join()[7])

    replay = device.capture(body)
    for run in (replay, body, replay):
        device.synchronize()
        with device.work():
            x.zero_()
            found.zero_()
            run()
        device.synchronize()
        assert found.tolist() == [3, 5, 7, 9, 11, 13]


@pytest.mark.parametrize("seed", [None, 1, 2, 3, 4])
def test_branches_arrive_as_late_as_they_may(seed) -> None:
    """In the order of their beginning; what they read must not change before."""
    device, ran = HostDevice(seed), []
    x = torch.ones(4)

    def body(number: int) -> Tensor:
        ran.append(number)
        return x * number

    branches = [device.branch(lambda number=number: body(number)) for number in range(1, 5)]
    unknown = [bool(branch._result.isnan().any()) for branch in branches]
    assert all(unknown) == (seed is None)
    assert branches[1].join().tolist() == [2] * 4
    assert branches[0]._result.tolist() == [1] * 4
    later = [number for number in ran if ran.count(number) > 1]
    assert list(dict.fromkeys(later)) == list(range(1, 1 + len(set(later))))
    device.run_branches(1)
    x.add_(1)
    if seed is None:
        with pytest.raises(InvariantError, match="what a branch reads has changed"):
            branches[3].join()


def test_what_another_thread_delivers_comes_in_its_order(device) -> None:
    """While steps run: whoever sees a number finds what was delivered before it."""
    rounds, size = 40, 4096
    values, number = (torch.zeros(n, dtype=torch.int64, device=device.where) for n in (size, 1))
    wrong, busy = torch.zeros(1, dtype=torch.int64, device=device.where), torch.ones(512, 512)
    busy = busy.to(device.where)
    device.synchronize()

    def deliver() -> None:
        source, name = (device.exchange_memory(n, torch.int64) for n in (size, 1))
        for i in range(1, rounds + 1):
            source.fill_(i)
            name.fill_(i)
            with device.beside():
                device.deliver(source, values)
                device.deliver(name, number)
            device.delivered().wait()

    thread = threading.Thread(target=deliver)
    thread.start()
    with device.work():
        while thread.is_alive():
            seen = number.clone()
            busy.mul_(1.0)
            wrong.add_((values < seen).sum())
    thread.join()
    device.synchronize()
    assert int(wrong) == 0
    assert int(number) == int(values.min()) == rounds


@pytest.mark.skipif(where.ON_GPU, reason="of the stand-in")
def test_copied_blocks_arrive_as_late_as_they_may(device) -> None:
    source, target = torch.arange(8).view(4, 2), torch.zeros(3, 2, dtype=torch.int64)
    arrays = BlockArrays([source]), BlockArrays([target])
    device.copy_blocks(*arrays, [3, 1], [0, 2])
    assert target.tolist()[1] == [0, 0]
    assert not set(target[[0, 2]].flatten().tolist()) & set(range(8))
    device.record().wait()  # which says nothing of them
    source[0] = 9
    device.join()
    assert target.tolist() == [[6, 7], [0, 0], [2, 3]]
    device.copy_blocks(*arrays, [3], [1])
    source[3, 1] = 5
    with pytest.raises(InvariantError, match="changed before they were copied"):
        device.synchronize()
    device.copy_blocks(*arrays, [2], [0])
    device.copy_blocks(*reversed(arrays), [0], [0])  # comes after it
    device.join()
    assert source[0].tolist() == source[2].tolist() == [4, 5]


@pytest.mark.parametrize("size", [1, 4096, 5_000_001])
def test_memory_of_the_host_starts_as_zeros(device, size) -> None:
    memory = device.host_memory(size, torch.uint8)
    assert memory.shape == (size,)
    assert not memory.any()
    assert memory.is_pinned() == where.ON_GPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_kv_goes_to_the_host_and_back_bit_for_bit(device, dtype) -> None:
    """With every block of the device in use, and while the blocks that it left are written."""
    groups = [KVGroup("full", (0, 1), None, 2, 8), KVGroup("sliding", (2,), 20, 1, 12)]
    store = KVStore(groups, [6, 5], 4, dtype_name(dtype), tensor_memory(str(DEVICE)))
    every = [t.view(torch.uint8) for g in (0, 1) for t in store.tensors(g)]
    for tensor in every:
        tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))
    kept = [tensor.clone() for tensor in every]
    device.synchronize()
    tier = device_tier(store, [5, 4], device)
    device.synchronize()
    source, target = ((0, 1, 4), (-1, 2, 3)), ((1, 2, 0), (-1, 0, 1))
    with device.work():
        tier.move(KVMove(0, Tier.HOST, source, target))
        device.join()
        for tensor in every:
            tensor.fill_(0x55)
        event = device.record()
    event.wait()
    back = ((5, 3, 0), (-1, 4, 0))
    with device.work():
        tier.move(KVMove(0, Tier.DEVICE, target, back))
    device.synchronize()
    for tensor, before, group in zip(every, kept, [0] * 4 + [1] * 2, strict=True):
        for old, new in zip(source[group], back[group], strict=True):
            if old >= 0:
                assert torch.equal(tensor[new], before[old])
        untouched = set(range(len(tensor))) - set(back[group])
        assert all((tensor[block] == 0x55).all() for block in untouched)
