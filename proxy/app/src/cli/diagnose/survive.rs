//! `diagnose --bisect` where a server crashed: which mitigations stop that, and the lines for the configuration.

use std::sync::{Mutex, PoisonError};

use tokio_util::sync::CancellationToken;
use warden_diagnose::report::{Added, SurvivalReport};
use warden_diagnose::survive::{Survival, Trying};
use warden_diagnose::{Experiment, Lab, Leg, Outcome};
use warden_policies::experiment::Finding;
use warden_policies::experiment::bisect::Arm;
use warden_policies::experiment::crash::Crash;
use warden_supervisor::SoloSpec;

use super::candidates::{self, Purpose};
use super::target::Target;
use crate::advice::Server;
use crate::cli::progress::Lines;
use crate::config::machine::Machine;
use crate::config::resolve::mitigations::Judge;
use crate::exit::Failure;
use crate::out;

/// Looks for what stops each crash of the experiment, one after the other.
pub(super) async fn run(
    target: &Target,
    machine: &Machine,
    experiment: &Experiment,
    outcome: &Outcome,
    lab: &Lab,
    stop: &CancellationToken,
) -> Result<Vec<SurvivalReport>, Failure> {
    let mut all = Vec::new();
    for finding in outcome.legs.iter().map(|leg| &leg.finding) {
        let Some(crash) = &finding.crash else { continue };
        if stop.is_cancelled() {
            break;
        }
        all.push(one(target, machine, experiment, outcome, (finding, crash), lab, stop).await?);
    }
    Ok(all)
}

async fn one(
    target: &Target,
    machine: &Machine,
    experiment: &Experiment,
    outcome: &Outcome,
    (finding, crash): (&Finding, &Crash),
    lab: &Lab,
    stop: &CancellationToken,
) -> Result<SurvivalReport, Failure> {
    let findings: Vec<&Finding> = outcome.legs.iter().map(|leg| &leg.finding).collect();
    let inherited: Vec<String> = machine.text_vars().into_iter().map(|(name, _)| name).collect();
    let resolved = &target.resolved;
    let (spec, build) = (&resolved.fleet.models[target.index], resolved.builds[target.index].as_ref());
    let server = Server::of(spec, build, &resolved.mitigations[target.index], &inherited);
    let mut judge = Judge::default();
    let seen = candidates::seen(&findings, &server);
    let purpose = Purpose::Crash { on_gpu: speaks_of_a_gpu(&crash.lines) };
    let found =
        candidates::find(resolved, target.index, &seen, purpose, &mut judge).map_err(Failure::failed)?;
    let configured = resolved.mitigations[target.index].list().to_vec();
    let judge = Mutex::new(judge);
    let items = |switches: &[usize]| -> Vec<&str> {
        switches.iter().filter_map(|at| found.switches.get(*at)).map(|switch| switch.item.as_str()).collect()
    };
    let with = |arm: &Arm| {
        let mut judge = judge.lock().unwrap_or_else(PoisonError::into_inner);
        let own = candidates::with(resolved, target.index, &configured, &items(&arm.switches), &mut judge)?;
        Ok(SoloSpec { command: own.command, ..target.spec.clone() })
    };
    let mut leg = target.spec.clone();
    if finding.control {
        // The last one counts.
        leg.command.args.extend(["--cache-ram".to_owned(), "0".to_owned()]);
    }
    let survival = Survival {
        leg: Leg {
            spec: leg,
            workload: finding.workload,
            steps: experiment.steps,
            early: false,
            replay: experiment.replay.clone(),
        },
        switches: found.switches.len(),
        clashes: found.clashes.clone(),
        with: &with,
    };
    let mut lines = Lines::new();
    let mut watch = |trying: Trying<'_>| match trying {
        Trying::Next { arm, done, of } => {
            let name = items(&arm.switches).join(" and ");
            let name =
                if arm.is_baseline() { "without any switch".to_owned() } else { format!("with {name}") };
            lines.line(&format!("crash under {}, {done} of at most {of} tried: {name}", finding.workload));
        }
        Trying::Leg(progress) => {
            if let warden_diagnose::Progress::Step { workload, done, of, .. } = progress {
                lines.change(&format!("{workload} {done}/{of}"), false);
            }
        }
    };
    let conclusion = survival.run(lab, crash, &mut watch, stop).await;
    lines.close();
    let conclusion = conclusion?;
    let (mut mitigations, mut added) = (Vec::new(), Added::default());
    if !conclusion.cure.is_empty() {
        mitigations.clone_from(&configured);
        mitigations.extend(items(&conclusion.cure).into_iter().map(str::to_owned));
        let cured = with(&Arm { switches: conclusion.cure.clone() }).map_err(Failure::failed)?;
        added = Added::between(&spec.command, &cured.command);
    }
    Ok(SurvivalReport {
        workload: finding.workload,
        switches: found.switches.clone(),
        not_tried: found.not_tried.clone(),
        conclusion,
        mitigations,
        added,
    })
}

/// Whether the last lines of a server are about what computes on a GPU: then what concerns it is tried first.
fn speaks_of_a_gpu(lines: &[String]) -> bool {
    lines.iter().any(|line| {
        let line = line.to_ascii_lowercase();
        ["cuda", "cublas", "hip", "rocm", "vulkan", "metal"].iter().any(|word| line.contains(word))
    })
}

/// Tells what was found: sentences, the lines for the configuration, what was tried, what was not.
pub(super) fn tell(report: &SurvivalReport, name: Option<&str>) -> Result<(), Failure> {
    out::line("")?;
    for sentence in report.sentences() {
        out::line(&format!("crash: {sentence}"))?;
    }
    if !report.mitigations.is_empty() {
        out::line("")?;
        super::bisect::tell_lines(&report.mitigations, &report.added, name)?;
    }
    out::line("")?;
    out::write(&out::table(&report.rows()))?;
    let left_out = report.left_out();
    if !left_out.is_empty() {
        out::line("")?;
        out::line("not tried:")?;
        for one in &left_out {
            out::line(&format!("{}: {}", one.item, one.why))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_says_where_it_computes() {
        let says = |line: &str| speaks_of_a_gpu(&[line.to_owned()]);
        assert!(says("CUDA error: an illegal instruction was encountered"));
        assert!(!says("GGML_ASSERT(n > 1) failed"));
    }
}
