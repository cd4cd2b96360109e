"""The level scheduler: boundaries, tables, limits, restarts, statistics, files, and its errors."""

import json
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from scheduler.nets import small_net, step_of
from sparta.errors import FileFormatError, NameNotFoundError, ValueRangeError
from sparta.scheduler import AmbaLevelPruneScheduler, Device, NormalMaskGenerator, Setup, STRFakeSparse, presets
from sparta.scheduler.hardware import DEVICES, device_of
from sparta.scheduler.level_table import LevelTable
from sparta.scheduler.lr_restart import LRRestart
from sparta.scheduler.prepared import original_of
from sparta.tesa.patterns import parse_pattern


def scheduler_of(**options):
    defaults = {"total_iters": 6, "sparsity_table": [40, 70], "output_dir": None, "save_dir": None}
    return AmbaLevelPruneScheduler(options.pop("setup", None), **(defaults | options))


def masks_of(scheduler):
    return {name: fake.mask.clone() for name, fake in scheduler._fakes().items()}


def test_masks_change_at_level_boundaries_only_and_weights_are_zeroed_at_a_levels_end():
    model = small_net()
    scheduler = scheduler_of(total_iters=7, sparsity_table=[20, 40, 60])  # levels begin at 0, 2 and 4
    model = scheduler.prepare_sparse_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    step_of(model, optimizer, 99)  # the forward pass works before any level is set
    before = masks_of(scheduler)
    for iteration in range(7):
        step_of(model, optimizer, iteration)
        scheduler.prune_model(model, iteration)
        now = masks_of(scheduler)
        changed = any(not torch.equal(before[name], now[name]) for name in now)
        assert changed == (iteration in {0, 2, 4})
        if iteration in {1, 3, 6}:
            stored = original_of(model.conv1, "weight")
            assert bool((stored[~now["conv1.weight"]] == 0).all())
        before = now
        assert scheduler.get_prune_step() == (0, 0, 2, 2, 4, 4, 4)[iteration]


def test_levels_are_reached_also_when_not_every_iteration_is_reported():
    scheduler = scheduler_of(total_iters=12, sparsity_table=[20, 40, 60])
    model = scheduler.prepare_sparse_model(small_net())
    for iteration in (1, 5, 11):
        scheduler.prune_model(model, iteration)
        wanted = (0.2, 0.4, 0.6)[iteration // 4]
        assert scheduler.compute_sparse_rate(model) == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("algo", [0, 1])
def test_layers_that_are_left_out_stay_dense_and_energy_levels_make_up_for_them(algo):
    scheduler = scheduler_of(prun_algo=algo, no_prune_keyword="stem", no_prune_layer="module.fc")
    model = scheduler.prepare_sparse_model(small_net())
    scheduler.prune_model(model, 0)
    rates = {name: column[0] for name, column in scheduler.table.layers.items()}
    assert rates["stem.weight"] == rates["fc.weight"] == 0
    sizes = scheduler.table.sizes
    if algo == 0:
        assert rates["conv1.weight"] == pytest.approx(0.4, abs=1e-3)
        assert scheduler.compute_sparse_rate(model) < 0.4
    else:
        total = sum(sizes.values())
        assert scheduler.compute_sparse_rate(model) == round(0.4 * total) / total


def test_a_keyword_is_a_substring_and_one_that_matches_nothing_is_told():
    scheduler = scheduler_of(no_prune_keyword=["conv", "encoder"])
    with pytest.warns(UserWarning, match="no layer's name contains 'encoder'"):
        scheduler.prepare_sparse_model(small_net())
    assert set(scheduler._fakes()) == {"stem.weight", "fc.weight"}
    with pytest.raises(NameNotFoundError, match="did you mean 'conv1'"):
        scheduler_of(no_prune_layer="conv11").prepare_sparse_model(small_net())


def test_early_stages_are_pruned_less_and_depthwise_ones_least():
    net = nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.Conv2d(8, 8, 3, padding=1),
    )
    with torch.no_grad():  # the same distribution everywhere
        for conv in net:
            values = torch.linspace(0.1, 1, conv.weight.numel())
            conv.weight.copy_(values.reshape(conv.weight.shape))
    scheduler = scheduler_of(default_input_shape=[1, 8, 16, 16])
    net = scheduler.prepare_sparse_model(net)
    scheduler.prune_model(net, 0)
    rates = [column[0] for column in scheduler.table.layers.values()]
    assert rates[1] < rates[0] == rates[2] < rates[3] < rates[4]
    assert scheduler_of(dw_no_prune=True, default_input_shape=[1, 8, 16, 16])


def test_depthwise_layers_can_be_left_out():
    scheduler = scheduler_of(dw_no_prune=True)
    net = scheduler.prepare_sparse_model(nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 3)))
    scheduler.prune_model(net, 0)
    assert scheduler.table.layers["0.weight"][0] == 0 < scheduler.table.layers["1.weight"][0]


def test_limits_of_a_layer_hold_and_a_level_out_of_reach_is_told():
    scheduler = scheduler_of(sparsity_table=[50], prune_tolerance_max=1.1)
    model = scheduler.prepare_sparse_model(small_net())
    scheduler.prune_model(model, 0)
    assert max(column[0] for column in scheduler.table.layers.values()) <= 0.55
    scheduler = scheduler_of(sparsity_table=[50], prune_tolerance_min=0.9)
    model = scheduler.prepare_sparse_model(small_net())
    scheduler.prune_model(model, 0)
    assert max(column[0] for column in scheduler.table.layers.values()) <= 0.55
    scheduler = scheduler_of(sparsity_table=[90], no_prune_keyword="conv2")
    model = scheduler.prepare_sparse_model(small_net())
    with pytest.warns(UserWarning, match="level 90% comes to"):
        scheduler.prune_model(model, 0)


def test_the_roofline_of_a_device_limits_convolutions():
    slow = {"name": "slow memory", "peak_macs": 1e12, "bandwidth": 1e9, "bytes_per_element": 1}
    scheduler = scheduler_of(prun_hw_aware=slow, default_input_shape=[1, 3, 8, 8])
    model = scheduler.prepare_sparse_model(small_net())
    with pytest.warns(UserWarning, match="comes to"):
        scheduler.prune_model(model, 0)
    assert scheduler.table.layers["conv1.weight"] == (0.0, 0.0)  # it waits for memory as it is
    assert scheduler.table.layers["fc.weight"][0] > 0.9
    assert Device("x", 1e9, 1e9, 1).useful_sparsity(0, 5) == 0
    assert {"generic", "nvidia-ampere", "nvidia-hopper", "x86-avx512"} <= DEVICES.keys()
    assert "2:4" in presets()
    for device in DEVICES.values():
        assert all(str(parse_pattern(pattern)) for pattern in device.patterns)
        assert device.advice
        # a large convolution may be pruned nearly empty, a tiny one waits for memory as it is
        assert device.useful_sparsity(1e12, 1e6) > 0.9
        assert device.useful_sparsity(1e3, 1e3) == 0


@pytest.mark.parametrize("preset", DEVICES)
def test_every_preset_can_be_used(preset):
    scheduler = scheduler_of(prun_hw_aware=preset, default_input_shape=[1, 3, 8, 8], sparse_rate_tolerance=1.0)
    model = scheduler.prepare_sparse_model(small_net())
    scheduler.prune_model(model, 0)
    for prepared in scheduler._layers:
        statistics = scheduler._statistics[prepared.name]
        if statistics.group is not None:
            limit = DEVICES[preset].useful_sparsity(statistics.macs, statistics.moved)
            assert scheduler.table.layers[prepared.name][0] <= limit + 1e-9


def test_the_table_in_the_folder_is_used_again_when_it_fits(tmp_path):
    folder = tmp_path / "analysis"

    def run(**options):
        scheduler = scheduler_of(output_dir=str(folder), **options)
        model = scheduler.prepare_sparse_model(small_net())
        scheduler.prune_model(model, 0)
        return scheduler.table

    first = run()
    edited = json.loads((folder / "level_table.json").read_text())
    edited["layers"]["fc.weight"] = [0.0, 0.125]
    (folder / "level_table.json").write_text(json.dumps(edited))
    assert run(do_sparse_analysis=False).layers["fc.weight"] == (0.0, 0.125)
    assert run() == first
    with pytest.warns(UserWarning, match="of another model or other levels"):
        run(do_sparse_analysis=False, sparsity_table=[10, 20])
    (folder / "level_table.json").write_text("{")
    with pytest.raises(FileFormatError, match="cannot read"):
        run(do_sparse_analysis=False)
    edited["layers"]["fc.weight"] = [0.5]
    (folder / "level_table.json").write_text(json.dumps(edited))
    with pytest.raises(FileFormatError, match="differ in length"):
        run(do_sparse_analysis=False)
    for damage in ({"kind": "other"}, [], {**edited, "layers": {"a": [7]}}, {**edited, "sizes": None}):
        with pytest.raises(FileFormatError):
            LevelTable.from_dict(damage)
    edited["layers"]["fc.weight"], edited["levels"] = [0.5, 0.5], [0.5, "0.9"]
    with pytest.raises(FileFormatError, match=r"levels\.1"):
        LevelTable.from_dict(edited)
    (folder / "level_table.json").write_text("[" * 100_000)
    with pytest.raises(FileFormatError, match="cannot read"):
        LevelTable.load(folder)


def test_macs_are_counted_for_one_example(tmp_path):
    scheduler = scheduler_of(output_dir=tmp_path, default_input_shape=[4, 3, 8, 8], total_iters=2, sparsity_table=[50])
    model = scheduler.prepare_sparse_model(small_net())
    model.train()
    state = torch.get_rng_state()
    for iteration in range(2):
        scheduler.prune_model(model, iteration)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    macs = {name: statistics.macs for name, statistics in scheduler._statistics.items()}
    assert macs["conv1.weight"] == 16 * 16 * 9 * 64
    assert macs["conv2.weight"] == 32 * 16 * 9 * 16
    assert macs["fc.weight"] == 32 * 4
    rows = (tmp_path / "pruner_report.csv").read_text().splitlines()
    assert rows[0] == "level,layer,weights,live,sparsity,macs,macs_left"
    assert rows[-1].startswith("0.5,network,")


def test_an_input_shape_may_come_with_the_first_call():
    late, early = scheduler_of(), scheduler_of(default_input_shape=[1, 3, 8, 8])
    for scheduler, shape in ((late, [1, 3, 8, 8]), (early, [7])):  # a shape given before is not overruled
        model = scheduler.prepare_sparse_model(small_net())
        scheduler.prune_model(model, 0, shape)
        assert scheduler.get_last_prune_step() == 0
    assert late._statistics == early._statistics


def test_masks_given_at_the_start_are_used():
    mask = torch.zeros(4, 32)
    mask[:, 0] = 1
    scheduler = scheduler_of(mask_dict={"fc": mask})
    model = scheduler.prepare_sparse_model(small_net())
    assert torch.equal(scheduler._fakes()["fc.weight"].mask, mask.bool())
    assert float((model.fc.weight != 0).float().mean()) == 1 / 32


def test_filters_by_level():
    scheduler = scheduler_of(setup=Setup(NormalMaskGenerator(True)), prun_algo=0, sparsity_table=[50])
    model = scheduler.prepare_sparse_model(small_net())
    scheduler.prune_model(model, 0)
    assert int((model.conv1.weight.flatten(1) == 0).all(1).sum()) == 8


# ---------------------------------------------------------------------- learning rates

SCHEDULES = {
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 5),
    "step": lambda o: lrs.StepLR(o, 2, 0.5),
    "lambda": lambda o: lrs.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "one cycle": lambda o: lrs.OneCycleLR(o, 0.5, total_steps=20),
    "sequential": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=2), lrs.CosineAnnealingLR(o, 4)], milestones=[2]
    ),
    "chained": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.5, 2), lrs.ExponentialLR(o, 0.9)]),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_restarted_schedule_gives_the_same_rates_again(kind):
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": 0.2}, {"params": [nn.Parameter(torch.ones(1))]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    schedule = SCHEDULES[kind](optimizer)
    restart = LRRestart(schedule)

    def rates():
        found = []
        for _ in range(7):
            found.append([(group["lr"], group["momentum"]) for group in optimizer.param_groups])
            optimizer.step()
            schedule.step()
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR uses a deprecated argument of its own
        first = rates()
        restart()
        second = rates()
    assert first == second


def test_a_plateau_restarts_at_the_first_rate():
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=torch.tensor(0.1))
    schedule = lrs.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    restart = LRRestart(schedule, init_lr=0.3)
    for _ in range(4):
        schedule.step(1.0)
    assert float(optimizer.param_groups[0]["lr"]) < 0.1
    restart()
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.3)
    assert schedule.num_bad_epochs == 0


def test_a_resumed_run_restarts_from_its_own_beginning():
    def start():
        scheduler = scheduler_of()
        model = scheduler.prepare_sparse_model(small_net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return scheduler, model, optimizer, lrs.ExponentialLR(optimizer, 0.5)

    scheduler, model, optimizer, schedule = start()
    scheduler.set_lr_scheduler(schedule)
    for iteration in range(2):
        step_of(model, optimizer, iteration)
        scheduler.prune_model(model, iteration)
        schedule.step()
    again, model, optimizer, resumed = start()
    resumed.load_state_dict(schedule.state_dict())
    again.set_lr_scheduler(resumed)  # in the middle of its course, which is not where the run began
    again.load_state_dict(scheduler.state_dict())
    again.prune_model(model, 3)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert resumed.last_epoch == 0


def test_bad_schedules_are_named():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ValueRangeError, match="without `optimizer`"):
        LRRestart(object())
    with pytest.raises(ValueRangeError, match="2 values of init_lr"):
        LRRestart(lrs.StepLR(optimizer, 1), [0.1, 0.2])


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sparsity_table": [30, 100]}, "has the level 100"),
        ({"sparsity_table": [-1]}, "has the level -1"),
        ({"sparsity_table": [50, 40]}, "rising levels"),
        ({"sparsity_table": []}, "sparsity_table is empty"),
        ({"total_iters": 1}, "one iteration per level"),
        ({"prun_algo": 2}, "prun_algo is 2"),
        ({"prun_algo_tuning": -1}, "prun_algo_tuning -1"),
        ({"prune_tolerance_max": 0.5}, r"prune_tolerance_max 0\.5"),
    ],
)
def test_bad_options_are_refused(options, text):
    with pytest.raises(ValueRangeError, match=text):
        scheduler_of(**options)


def test_bad_calls_are_refused():
    scheduler = scheduler_of()
    model = small_net()
    for call in (
        lambda: scheduler.prune_model(model, 0),
        lambda: scheduler.set_lr_scheduler(None),
        lambda: scheduler.compute_sparse_rate(model),
        lambda: scheduler.export_sparse_model(model),
    ):
        with pytest.raises(ValueRangeError, match="not prepared"):
            call()
    with pytest.raises(ValueRangeError, match="learnt masks"):
        scheduler_of(setup=Setup(fake_sparse=STRFakeSparse)).prepare_sparse_model(small_net())
    scheduler.prepare_sparse_model(model)
    with pytest.raises(ValueRangeError, match="already"):
        scheduler.prepare_sparse_model(small_net())
    with pytest.raises(ValueRangeError, match="already prepared"):
        scheduler_of().prepare_sparse_model(model)
    with pytest.raises(ValueRangeError, match="not the model that was prepared"):
        scheduler.prune_model(small_net(), 0)
    for iteration in (-1, 1.5, True):
        with pytest.raises(ValueRangeError, match="iteration is"):
            scheduler.prune_model(model, iteration)
    with pytest.raises(ValueRangeError, match="total_iterations - 1"):
        scheduler.prune_model(model, 6)
    stranger = torch.optim.SGD(small_net().parameters(), lr=0.1)
    with pytest.raises(ValueRangeError, match="holds no weight of the prepared model"):
        scheduler.set_lr_scheduler(lrs.StepLR(stranger, 1))
    with pytest.raises(ValueRangeError, match="nothing is analysed"):
        _ = scheduler.table
    for shape in ([1, 0, 8, 8], [1, 3]):
        other = scheduler_of(default_input_shape=shape)
        net = other.prepare_sparse_model(small_net())
        with pytest.raises(ValueRangeError, match="default_input_shape"):
            other.prune_model(net, 0)


def test_devices_are_checked():
    with pytest.raises(NameNotFoundError, match="did you mean 'nvidia-hopper'"):
        device_of("nvidia-hoper")
    with pytest.raises(NameNotFoundError, match="did you mean 'bandwidth'"):
        device_of({"bandwith": 1.0})
    with pytest.raises(ValueRangeError, match="without"):
        device_of({"bandwidth": 1.0})
    with pytest.raises(ValueRangeError, match="peak_macs"):
        device_of({"bandwidth": 1.0, "peak_macs": 0})
