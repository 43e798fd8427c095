"""Every figure that is measured of a trial: what it is called in reports, in what unit, and what it means. Loads no torch."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

MIB = 2**20
"""Bytes."""


@dataclass(frozen=True)
class Metric:
    """A name is kept in journals, trackers and tables with the value in samples, seconds, bytes or as a share."""

    meaning: str
    heading: str = ""
    """What people read above it; empty: its name."""
    unit: str = ""
    """Of the numbers that people read: `per_unit` of the value make one."""
    per_unit: float = 1.0
    format: str = "{:,.4g}"

    @property
    def headline(self) -> str:
        """The heading with the unit, as it stands above a column of numbers; empty without a heading."""
        return ", ".join(filter(None, [self.heading, self.unit]))

    def number(self, value: float) -> str:
        """Return what stands under the heading, which names the unit. A loss has three decimals, where these are neither too few digits nor
        too many."""
        number, form = value / self.per_unit, self.format
        if self.unit == "%" and value > 1:
            return "-"  # of more than all a part was mismeasured; a journal of another version may have it
        if form == _LOSS and number and not 0.1 <= abs(number) < 1000:
            form = "{:,.3g}"
        return form.format(number)

    def text(self, value: float) -> str:
        """Return the number with its unit."""
        return " ".join(filter(None, [self.number(value), self.unit]))


_LOSS, _GAP = "{:,.3f}", "{:+.2g}"  # seeds vary by more than further digits say
_OF_THE_RUN = "over the last 1,000 steps at most"
_AT_REST = "at weights that stand still, by the last snapshot"

METRICS = {  # a name stays: journals and checkpoints have it
    "samples_seen": Metric("Samples that it has trained on.", "samples", format="{:,.0f}"),
    "learning_rate": Metric("Of the last step."),
    "loss": Metric("The mean training loss since the last report.", format=_LOSS),
    "final_loss": Metric("The training loss of the last step.", "final loss", format="{:.6f}"),
    "val_loss": Metric("Without dropout, over `evaluation_samples` validation samples from all parts of the set, of a stream its first; with averaged weights where there are any.", "val loss", format=_LOSS),
    "train_loss": Metric("As val_loss is measured, over samples that it has trained on.", "train loss", format=_LOSS),
    "generalisation_gap": Metric("val_loss less train_loss.", "generalisation gap", format=_GAP),
    "perplexity": Metric("exp(val_loss), of text.", format="{:,.2f}"),
    "tokens_per_second": Metric("Targets a second over all ranks, the median of the timed steps.", "tokens/s", format="{:,.0f}"),
    "planned_samples_per_second": Metric("What its sample budget was made for."),
    "step_seconds": Metric("Of a whole step, the median of the timed ones.", "step", "ms", 1e-3, "{:,.1f}"),
    "epoch_seconds": Metric("Of all training samples once at that speed."),
    "train_seconds": Metric("Of all steps, without compiling and evaluations.", "training", "s", format="{:,.1f}"),
    "compile_seconds": Metric("Of compiling and its trial step, in this process and those that the trial goes on from.", "compiling", "s", format="{:,.1f}"),
    "data_wait": Metric("The share of their time that steps waited for data."),
    "data_workers": Metric("Processes that fetch batches ahead of a rank."),
    "stream_passes": Metric("How often a stream has been read to its end."),
    "micro_batches_per_step": Metric("Over all ranks, where they are cut by tokens.", "micro-batches a step", format="{:,.1f}"),
    "tokens_per_step": Metric("Of the samples themselves, where micro-batches are cut by tokens.", "tokens a step", format="{:,.0f}"),
    "padding_share": Metric("Of the tokens of its micro-batches, where these are cut by tokens.", "padding", "%", 0.01, "{:.1f}"),
    "peak_memory_bytes": Metric(
        "Of the first rank: on a GPU what the allocator had reserved, on a CPU the resident set above the idle process in the three steps of the warm-up, without pages of files.", "peak memory", "MiB", MIB, "{:,.0f}"
    ),
    "peak_allocated_bytes": Metric("Of that, what tensors held, on a GPU.", "allocated by tensors", "MiB", MIB, "{:,.0f}"),
    "predicted_memory_bytes": Metric("The peak of eager code that fake tensors had predicted.", "predicted", "MiB", MIB, "{:,.0f}"),
    "device_memory_bytes": Metric("What of the GPU a rank can have."),
    "allocator_retries": Metric("How often a GPU's allocator emptied its cache and asked again, in the timed steps."),
    "mfu": Metric(
        "Model FLOPs utilisation: of the device's peak, without recomputation (Chowdhery et al. 2022, arXiv 2204.02311).",
        "MFU", "%", 0.01, "{:.1f}",
    ),
    "hfu": Metric("Hardware FLOPs utilisation: with recomputation.", "HFU", "%", 0.01, "{:.1f}"),
    "model_flops_per_sample": Metric("Of a forward and a backward pass."),
    "assumed_peak_flops": Metric("The device's peak that mfu and hfu are relative to, FLOP/s."),
    "peak_is_measured": Metric("1 if that peak was measured, 0 if it is the data sheet's."),
    "loss_scale": Metric("Of float16's gradients."),
    "gradient_norm": Metric("Of the last step's gradient, before it is clipped."),
    "gradient_mean": Metric("Over all entries of a gradient, after it was clipped: of the last step that was looked at so closely, one in some tens."),
    "gradient_variance": Metric("The variance of the same entries."),
    "update_norm": Metric("How far that step moved the weights, weight decay included."),
    "update_ratio": Metric("That over the weights' own norm.", "update / weights", format="{:.1e}"),
    "adam_snr": Metric("sum m^2 / sum v of Adam's moments, bias-corrected: 1 for a gradient that is always the same."),
    "successive_cosine": Metric("The mean cosine of each micro-batch's gradient with the sum of those before it in its step: near 0 for noise."),
    "coherence": Metric(f"The mean inner product of two micro-batches' gradients over their mean square, {_OF_THE_RUN}.", format="{:.3f}"),
    "coherence_floor": Metric("The 95 % bound of the coherence of pure noise, without its sign.", "its floor", format="{:.3f}"),
    "noise_scale": Metric(
        f"tr(S) / |G|^2 in samples (McCandlish et al. 2018, arXiv 1812.06162), {_OF_THE_RUN}.", "noise scale", "samples", format="{:,.1f}"
    ),
    "noise_scale_low": Metric("The lower end of its 95 % interval.", "low", format="{:,.1f}"),
    "noise_scale_high": Metric("The upper end.", "high", format="{:,.1f}"),
    "gradient_snr": Metric("Of the whole step's gradient: the effective batch over the noise scale."),
    "inverse_noise_scale": Metric("|G|^2 / tr(S): the scale on which runs are averaged."),
    "inverse_noise_scale_error": Metric("Its standard error."),
    "inverse_noise_scale_steps": Metric("The number of steps that it comes from."),
    "snapshot_samples_seen": Metric("Samples seen when the last snapshot of the gradient noise was taken."),
    "snapshot_micro_batches": Metric("How many gradients it was taken from."),
    "snapshot_noise_scale": Metric(f"The noise scale {_AT_REST}."),
    "snapshot_noise_scale_low": Metric("The lower end of its 95 % interval."),
    "snapshot_noise_scale_high": Metric("The upper end."),
    "snapshot_coherence": Metric(f"The coherence {_AT_REST}."),
    "snapshot_coherence_floor": Metric("The 95 % bound of that of pure noise."),
    "goodput": Metric("Samples a second times what each is worth, relative to the best batch.", "goodput, relative", format="{:.2f}"),
    "rho": Metric("The distance from the reference run's weights, over how far that one went.", format="{:.1e}"),
    "parts_loss_ratio": Metric("The losses of samples one by one, added up, over that of all in one batch: 1 for a sum."),
    "parts_targets_ratio": Metric("The same of the number of targets."),
    "parts_training_ratio": Metric("The losses of two halves, added up, over that of both in one batch, in training mode."),
    "loss_randomness": Metric("How far the training loss is from that with other random numbers, as a share."),
    "num_batch_norms": Metric("The model's BatchNorm layers."),
    "num_dropouts_off": Metric("Dropouts that were switched off for the comparison."),
    "other_cpu_share": Metric("Of the CPUs, what other processes took while steps were timed."),
    "stolen_cpu_share": Metric("Of the CPUs, what the machine's host gave to others."),
    "cpu_wait_share": Metric("Of the time, how long a rank waited for a CPU."),
    "clock_hertz": Metric("The lowest clock while steps were timed."),
    "clock_ratio": Metric("That over the highest, on a CPU."),
    "gpu_clock_ratio": Metric("The same of a GPU."),
    "gpu_slowed": Metric("1 if the GPU slowed itself down for another reason than its power limit."),
    "gpu_throttle_reasons": Metric("NVML's bits of all reasons that were read, the power limit's among them."),
    "gpu_watts": Metric("The highest power that was read."),
    "other_gpu_processes": Metric("Other processes on the GPU."),
}  # fmt: skip


def metric_of(name: str) -> Metric:
    """Return the metric of this name. Raises KeyError, with the nearest name, where there is none."""
    if name not in METRICS:
        near = difflib.get_close_matches(name, METRICS, n=1)
        raise KeyError(f"there is no metric '{name}'; {f'did you mean {near[0]}?' if near else 'add it to METRICS'}")
    return METRICS[name]
