//! `diagnose --headroom`: evaluates the largest prompts and reports whether they fit in memory. Stores the
//! measurements for `serve`: admission uses the memory of a prompt, automatic budgets the largest size.

use tokio_util::sync::CancellationToken;
use warden_config::arguments;
use warden_diagnose::headroom::{
    HeadroomMeasurement, HeadroomProgress, HeadroomRun, measure_headroom, measure_smaller_context,
};
use warden_diagnose::report::HeadroomReport;
use warden_diagnose::{DiagnoseError, Lab};
use warden_experiment::headroom::grouped;
use warden_policies::units::scale_bytes;
use warden_policies::{ByteSize, MemoryKind};
use warden_supervisor::{ServerCommand, SoloSpec};

use super::target::DiagnoseTarget;
use crate::cli::progress::ProgressLines;
use crate::exit::CommandError;
use crate::out;

pub(super) async fn run(
    target: &DiagnoseTarget,
    lab: &Lab,
    stop: &CancellationToken,
) -> Result<HeadroomReport, CommandError> {
    let numbers = &lab.numbers.headroom;
    let mut lines = ProgressLines::new();
    let first = touch_for(&target.spec, numbers.lengths.clone());
    let touched = touch_once(lab, &first, &mut lines, stop).await?;
    let reserve = numbers.reserve.0;
    let report = HeadroomReport::new(touched, None, reserve);
    if !report.can_run_out() || report.touched.interrupted {
        lines.close();
        return Ok(report);
    }
    let mut touched = report.touched;
    let setup = touched.setup;
    let less = scale_bytes(setup.context, numbers.less_context);
    if less >= numbers.context_grain {
        lines.line(&format!(
            "headroom: the start alone with -c {less}, to see what a smaller context would free"
        ));
        match measure_smaller_context(lab, &target.spec, less, stop).await {
            Ok(less) => touched.less_context = Some(less),
            Err(DiagnoseError::Interrupted) => touched.interrupted = true,
            // A failed start with a smaller context only leaves its savings unknown.
            Err(error) => lines.line(&format!("headroom: {error}")),
        }
    }
    let half = setup.ubatch / 2;
    let mut smaller = None;
    if half > 0 && !touched.interrupted {
        lines.line(&format!(
            "headroom: the same with -ub {half}, to see what smaller micro-batches would save"
        ));
        let mut spec = target.spec.clone();
        // llama-server uses the last occurrence of the flag.
        spec.command.args.extend(["--ubatch-size".to_owned(), half.to_string()]);
        let upper = numbers.lengths.iter().copied().filter(|share| *share >= numbers.again_from).collect();
        // A failed start only leaves the savings of smaller micro-batches unknown.
        smaller = touch_once(lab, &touch_for(&spec, upper), &mut lines, stop).await.ok();
        touched.interrupted |= stop.is_cancelled();
    }
    lines.close();
    Ok(HeadroomReport::new(touched, smaller, reserve))
}

fn touch_for(spec: &SoloSpec, lengths: Vec<f64>) -> HeadroomRun {
    let ServerCommand { args, env, .. } = &spec.command;
    let variable =
        |name: &str| env.iter().find(|(own, _)| own == name).and_then(|(_, value)| value.parse().ok());
    HeadroomRun {
        spec: spec.clone(),
        context: arguments::context(args).or_else(|| variable("LLAMA_ARG_CTX_SIZE")),
        ubatch: arguments::ubatch(args).or_else(|| variable("LLAMA_ARG_UBATCH")),
        lengths,
    }
}

async fn touch_once(
    lab: &Lab,
    what: &HeadroomRun,
    lines: &mut ProgressLines,
    stop: &CancellationToken,
) -> Result<HeadroomMeasurement, CommandError> {
    let mut watch = |touching: HeadroomProgress<'_>| match touching {
        HeadroomProgress::Starting => lines.line("headroom: starting the server"),
        HeadroomProgress::Sending { tokens, together } => {
            lines.change(&format!("headroom: {}", describe_prompts(tokens, together)), false);
        }
        HeadroomProgress::Took { tokens, together, peaks } => {
            let each = peaks.iter().map(|(series, bytes)| format!("{series} {}", ByteSize(*bytes)));
            let each = each.collect::<Vec<_>>().join(", ");
            lines.change(&format!("headroom: {}: {each}", describe_prompts(tokens, together)), true);
        }
    };
    Ok(measure_headroom(lab, what, &mut watch, stop).await?)
}

fn describe_prompts(tokens: u64, together: u32) -> String {
    let tokens = grouped(tokens);
    if together > 1 {
        format!("{together} prompts of {tokens} tokens at once")
    } else {
        format!("a prompt of {tokens} tokens")
    }
}

pub(super) fn store_measurements(
    target: &DiagnoseTarget,
    report: &HeadroomReport,
) -> Result<(), CommandError> {
    let mut learnt = report.learned_prices();
    // Omit a size that does not fit: budgets must not allow memory to grow to that size.
    let fits = |series: MemoryKind| {
        report.verdicts.iter().any(|verdict| verdict.series == series && verdict.fits() != Some(false))
    };
    learnt.worst.retain(|(series, _)| fits(*series));
    let spec = target.model();
    let state = &target.resolved.dirs.state;
    let keep = target.resolved.fleet.watch.sensors.priors_kept;
    warden_supervisor::remember_measurements(state, &spec.name, &spec.command, learnt, keep)
        .map_err(CommandError::cannot("keep what was measured in", state))
}

pub(super) fn headroom_text(report: &HeadroomReport) -> String {
    let sentences = report.sentences().into_iter().map(|sentence| sentence + "\n");
    out::format_table(&report.rows()) + "\n" + &sentences.collect::<String>()
}
