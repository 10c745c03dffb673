//! Promise: sidecars bound and report a server's memory, touch nothing in use, and do nothing unless a
//! variable is set. Tested with a strict simulated CUDA runtime, for the struct layouts of each era
//! (`tests/sidecar`), and with the structs of real trees.

mod build;
mod checkpoints;
mod drift;
mod fork;
mod reclaim;
mod report;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::time::Duration;

use build::{Flavour, Shape, binary};
use warden_rig::process::Kid;
use warden_rig::{Context as _, Outcome, Trouble};

/// Limit for a scenario under a sanitizer on a busy machine; the longest takes seconds.
const LONG: Duration = Duration::from_secs(240);

const CAP: &str = "LLAMA_WARDEN_GRAPH_CACHE_CAP";
const TRIM: &str = "LLAMA_WARDEN_GRAPH_IDLE_TRIM_S";
const BUDGET: &str = "LLAMA_WARDEN_POOL_BUDGET_MIB";
const INTERVAL: &str = "LLAMA_WARDEN_POOL_PURGE_INTERVAL_MS";
const RESET: &str = "LLAMA_WARDEN_CUBLAS_RESET_EVERY";
const RESET_INTERVAL: &str = "LLAMA_WARDEN_CUBLAS_RESET_INTERVAL_S";
const REPORT: &str = "LLAMA_WARDEN_REPORT";
const RECLAIM: &str = "LLAMA_WARDEN_RECLAIM";

struct Run {
    name: String,
    kid: Kid,
    folder: tempfile::TempDir,
}

fn start(
    program: &std::path::Path,
    args: &[&str],
    env: &[(&str, &str)],
    name: String,
) -> Result<Run, Trouble> {
    let folder = tempfile::tempdir()?;
    let log = folder.path().join("log");
    let home = folder.path().join("home");
    std::fs::create_dir(&home)?;
    let env: BTreeMap<OsString, OsString> =
        env.iter().map(|(name, value)| (name.into(), value.into())).collect();
    let args: Vec<OsString> = args.iter().map(OsString::from).collect();
    let kid = Kid::start(program, &args, &env, &home, log)?;
    Ok(Run { name, kid, folder })
}

impl Run {
    async fn succeeds(&mut self) -> Result<String, Trouble> {
        let code = self.kid.exit(LONG).await.context(&self.name)?;
        let output = self.kid.output();
        if code == 0 { Ok(output) } else { Err(Trouble::new(format!("{}: {code}\n{output}", self.name))) }
    }
}

/// Runs a scenario in these shapes in parallel, some also with sanitizers.
async fn scenario(
    name: &str,
    pools: &str,
    shapes: &[Shape],
    env: &[(&str, &str)],
) -> Result<Vec<(Run, String)>, Trouble> {
    let mut runs = Vec::new();
    for shape in shapes {
        for flavour in Flavour::of(*shape) {
            let Some(program) = binary(*shape, flavour).await? else { continue };
            let title = format!("{name} {pools} in shape {shape:?}, {flavour:?}");
            runs.push(start(&program, &[name, pools], env, title)?);
        }
    }
    let mut ended = Vec::new();
    for mut run in runs {
        let output = run.succeeds().await?;
        ended.push((run, output));
    }
    Ok(ended)
}

async fn with_both_pools(name: &str, shapes: &[Shape], env: &[(&str, &str)]) -> Outcome {
    for pools in ["legacy", "vmm"] {
        scenario(name, pools, shapes, env).await?;
    }
    Ok(())
}

#[tokio::test]
async fn without_variables_it_makes_no_call_no_thread_no_file_and_no_line() -> Outcome {
    for env in [
        &[][..],
        &[(CAP, ""), (TRIM, "0"), (BUDGET, "0"), (RESET, ""), (REPORT, ""), (RECLAIM, ""), (INTERVAL, "5")],
    ] {
        for (run, output) in scenario("inert", "legacy", &Shape::ALL, env).await? {
            assert_eq!(output, "", "{}", run.name);
            let files = std::fs::read_dir(run.folder.path().join("home"))?.count();
            assert_eq!(files, 0, "{}", run.name);
        }
    }
    Ok(())
}

#[tokio::test]
async fn all_fixes_together_leak_nothing_and_touch_nothing_in_use() -> Outcome {
    let folder = tempfile::tempdir()?;
    // The processes share one file.
    let report = folder.path().join("report");
    let report = report.to_str().context("a path")?;
    let env =
        [(CAP, "4"), (BUDGET, "1"), (INTERVAL, "1"), (RESET, "10"), (RESET_INTERVAL, "1"), (REPORT, report)];
    with_both_pools("everything", &Shape::ALL, &env).await?;
    let and_idle = [&env[..], &[(TRIM, "1")]].concat();
    with_both_pools("everything", &Shape::ALL, &and_idle).await
}

#[tokio::test]
async fn graphs_stay_within_the_cap_and_the_least_recently_used_go_first() -> Outcome {
    scenario("cap", "legacy", &Shape::WITH_MAP, &[(CAP, "4")]).await?;
    scenario("lru", "legacy", &Shape::WITH_MAP, &[(CAP, "4")]).await?;
    scenario("one", "legacy", &Shape::WITH_MAP, &[(CAP, "1")]).await?;
    Ok(())
}

#[tokio::test]
async fn graphs_that_recur_are_kept_above_the_cap_and_others_never_count() -> Outcome {
    for name in ["rotation", "used_once", "mixed", "reuse"] {
        scenario(name, "legacy", &Shape::WITH_MAP, &[(CAP, "16")]).await?;
    }
    scenario("swept", "legacy", &Shape::WITH_MAP, &[(CAP, "1000")]).await.map(drop)
}

#[tokio::test]
async fn an_idle_server_gives_its_graphs_back_each_time() -> Outcome {
    scenario("idle_trim", "legacy", &Shape::WITH_IDLE_GRAPHS, &[(TRIM, "1")]).await.map(drop)
}

#[tokio::test]
async fn nothing_is_given_back_under_a_computation_or_a_capture() -> Outcome {
    for name in ["idle_busy", "idle_capture", "idle_guard_alone"] {
        scenario(name, "legacy", &Shape::WITH_IDLE_GRAPHS, &[(TRIM, "1")]).await?;
    }
    Ok(())
}

#[tokio::test]
async fn pools_are_given_back_above_the_budget_when_nothing_is_in_use() -> Outcome {
    with_both_pools("purge", &Shape::ALL, &[(BUDGET, "1"), (INTERVAL, "20000")]).await?;
    with_both_pools("idle_purge", &Shape::WITH_LOCK, &[(BUDGET, "1"), (INTERVAL, "1000")]).await
}

#[tokio::test]
async fn pools_that_hoard_are_given_back_however_often_and_after_each_micro_batch_if_that_is_wanted()
-> Outcome {
    with_both_pools("hoard", &Shape::ALL, &[(BUDGET, "1"), (INTERVAL, "1")]).await?;
    with_both_pools("every_batch", &Shape::ALL, &[(BUDGET, "1"), (INTERVAL, "0")]).await
}

#[tokio::test]
async fn adding_up_over_devices_keeps_the_pools_that_it_uses() -> Outcome {
    with_both_pools("all_reduce", &Shape::WITH_LOCK, &[(BUDGET, "1"), (INTERVAL, "1000")]).await?;
    let env = [(CAP, "2"), (TRIM, "1"), (BUDGET, "1"), (INTERVAL, "1"), (RESET, "10"), (RESET_INTERVAL, "1")];
    scenario("all_reduce_race", "legacy", &Shape::WITH_LOCK, &env).await.map(drop)
}

#[tokio::test]
async fn graphs_that_another_thread_clears_are_held_meanwhile() -> Outcome {
    // The fork's shape has no thread sanitizer.
    let program = binary(Shape::Fork, Flavour::Thread).await?;
    let Some(program) = program else { return Ok(()) };
    start(&program, &["cleared_elsewhere"], &[(TRIM, "1")], "cleared_elsewhere".into())?.succeeds().await?;
    scenario("cleared_elsewhere", "legacy", &[Shape::Fork], &[(TRIM, "1")]).await.map(drop)
}

#[tokio::test]
async fn what_is_needed_again_is_given_back_ever_more_rarely_and_never_while_the_device_works() -> Outcome {
    for name in ["idle_backs_off", "stream_busy"] {
        with_both_pools(name, &Shape::WITH_LOCK, &[(BUDGET, "1"), (INTERVAL, "1")]).await?;
    }
    Ok(())
}

#[tokio::test]
async fn entries_that_hold_nothing_go_without_waiting_for_a_stream() -> Outcome {
    scenario("nothing_held", "legacy", &Shape::WITH_MAP, &[(CAP, "4")]).await.map(drop)
}

#[tokio::test]
async fn a_handle_that_could_not_be_had_again_is_not_given_up() -> Outcome {
    scenario("cublas_low_memory", "legacy", &Shape::ALL, &[(RESET, "10"), (RESET_INTERVAL, "1")])
        .await
        .map(drop)
}

#[tokio::test]
async fn a_forked_child_ends_without_waiting_for_a_thread_that_it_does_not_have() -> Outcome {
    for shape in Shape::WITH_MAP {
        // Sanitizers have problems with forks.
        let program = binary(shape, Flavour::Plain).await?.context("it needs no sanitizer")?;
        start(&program, &["fork_exit"], &[(TRIM, "3600")], format!("fork_exit {shape:?}"))?
            .succeeds()
            .await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_fix_that_a_build_cannot_have_is_said_to_be_out_of_reach_and_never_active() -> Outcome {
    let cases = [
        (Shape::One, CAP, "16", "a context has no cache of graphs"),
        (Shape::Plain, CAP, "16", "a context has no cache of graphs"),
        (Shape::Plain, TRIM, "5", "it captures no graphs"),
        (Shape::OneBare, TRIM, "5", "nothing tells whether a graph is being captured"),
    ];
    for (shape, variable, value, why) in cases {
        let program = binary(shape, Flavour::Plain).await?.context("it needs no sanitizer")?;
        // An unknown scenario ends at once.
        let mut run = start(&program, &["none"], &[(variable, value)], format!("{shape:?} {variable}"))?;
        assert_eq!(run.kid.exit(LONG).await?, 2);
        let output = run.kid.output();
        assert!(output.contains(&format!("{variable} is not to be had in this build: {why}")), "{output}");
        assert!(!output.contains(" active"), "{shape:?}: {output}");
    }
    let program = binary(Shape::OneBare, Flavour::Plain).await?.context("it needs no sanitizer")?;
    let mut run = start(&program, &["none"], &[(BUDGET, "256")], "bare".into())?;
    assert_eq!(run.kid.exit(LONG).await?, 2);
    assert!(run.kid.output().contains("pool-purge active: budget 256 MiB, interval 1000 ms, not while idle"));
    Ok(())
}

#[tokio::test]
async fn cublas_handles_are_renewed_for_each_context_and_nothing_of_them_leaks() -> Outcome {
    with_both_pools("cublas", &Shape::ALL, &[(RESET, "10"), (RESET_INTERVAL, "1")]).await
}

#[tokio::test]
async fn a_lock_that_is_not_to_be_had_and_a_broken_stream_are_left_alone() -> Outcome {
    for name in ["lock_timeout", "stream_error"] {
        scenario(name, "legacy", &Shape::WITH_MAP, &[(CAP, "1")]).await?;
    }
    Ok(())
}

#[tokio::test]
async fn two_threads_compute_and_capture_beside_the_idle_thread() -> Outcome {
    let folder = tempfile::tempdir()?;
    let report = folder.path().join("report");
    let report = report.to_str().context("a path")?;
    let env = [
        (CAP, "4"),
        (TRIM, "1"),
        (BUDGET, "1"),
        (INTERVAL, "1"),
        (RESET, "10"),
        (RESET_INTERVAL, "1"),
        (REPORT, report),
    ];
    with_both_pools("two_threads", &Shape::WITH_MAP, &env).await
}

#[tokio::test]
async fn the_process_ends_while_the_idle_thread_is_at_work_or_stuck() -> Outcome {
    for name in ["exit_busy", "exit_stuck"] {
        scenario(name, "legacy", &Shape::WITH_MAP, &[(TRIM, "1")]).await?;
    }
    Ok(())
}

#[tokio::test]
async fn without_a_thread_to_be_had_the_server_goes_on() -> Outcome {
    let program = binary(Shape::Spaces, Flavour::NoThreads).await?.context("it needs no sanitizer")?;
    let output = start(&program, &["no_thread"], &[(TRIM, "1")], "no_thread".into())?.succeeds().await?;
    assert!(output.contains("nothing will be given back while idle"), "{output}");
    Ok(())
}

#[tokio::test]
async fn a_value_that_is_no_value_is_told_in_one_line_and_switches_nothing_on() -> Outcome {
    let program = binary(Shape::Spaces, Flavour::Plain).await?.context("it needs no sanitizer")?;
    let off = [CAP, TRIM, BUDGET, RESET];
    let bad = [
        "x",
        "-1",
        "1.5",
        " 5",
        "5 ",
        "99999999999999999999999",
        "18446744073709551617",
        "0x10",
        "1000000001",
    ];
    for variable in off {
        for value in bad {
            let name = format!("{variable}={value}");
            let output = start(&program, &["inert"], &[(variable, value)], name.clone())?.succeeds().await?;
            assert_eq!(output.lines().count(), 1, "{name}: {output}");
            assert!(output.contains(&format!("{variable}={value} is ignored")), "{name}: {output}");
        }
    }
    // These variables have a default, so the fix is on nevertheless.
    for (variable, values) in [(INTERVAL, &["x", "-1"][..]), (RESET_INTERVAL, &["0", "x", "-1"])] {
        for value in values {
            let name = format!("{variable}={value}");
            let output = start(&program, &["inert"], &[(variable, value)], name.clone())?.succeeds().await?;
            assert!(output.contains(&format!("{variable}={value} is ignored")), "{name}: {output}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn each_fix_says_that_it_is_active_when_the_program_starts() -> Outcome {
    let program = binary(Shape::Spaces, Flavour::Plain).await?.context("it needs no sanitizer")?;
    let fixes = [
        (CAP, "16", "graph-cache-cap active: cap 16 graphs"),
        (TRIM, "7", "graph-cache-cap active: cap 0 graphs, idle trim 7 s"),
        (BUDGET, "256", "pool-purge active: budget 256 MiB, interval 1000 ms"),
        (RESET, "1000", "cublas-reset active: every 1000 computes, interval 10 s"),
        (REPORT, "/nowhere/report", "memory-report active: /nowhere/report"),
        (RECLAIM, "/nowhere/reclaim", "reclaim-cuda active: /nowhere/reclaim"),
    ];
    for (variable, value, line) in fixes {
        // An unknown scenario ends at once, before any computation.
        let mut run = start(&program, &["none"], &[(variable, value)], variable.into())?;
        assert_eq!(run.kid.exit(LONG).await?, 2);
        let output = run.kid.output();
        assert!(output.contains(&format!("llama-warden: fix {line}")), "{output}");
        assert_eq!(output.matches("llama-warden:").count(), 1, "{output}");
    }
    Ok(())
}

#[tokio::test]
async fn a_wait_ends_in_its_time_however_often_others_wake_it_and_only_with_the_variable() -> Outcome {
    const VARIABLE: &str = "LLAMA_WARDEN_CANCEL_NONSTREAM";
    let program = build::server().await?;
    let cases = [
        (Some("1"), "busy", "timeout"),
        (Some("1"), "quiet", "timeout"),
        (Some("1"), "there", "result"),
        (Some("0"), "quiet", "timeout"),
        (Some("0"), "busy", "result"),
        (Some("yes"), "busy", "result"),
        (None, "busy", "result"),
    ];
    for (value, server, came) in cases {
        let env: Vec<(&str, &str)> = value.map(|value| (VARIABLE, value)).into_iter().collect();
        let output = start(&program, &[server], &env, format!("{value:?} {server}"))?.succeeds().await?;
        let last = output.lines().last().unwrap_or_default();
        let (what, waited) = last.split_once(' ').context(&output)?;
        let waited: u64 = waited.parse()?;
        assert_eq!(what, came, "{value:?} {server}: {output}");
        if came == "timeout" {
            // The busy server would answer after three seconds; upstream's own wait is one second.
            let expected = if value == Some("1") { 250..1000 } else { 1000..3000 };
            assert!(expected.contains(&waited), "{value:?} {server}: {output}");
        }
        let lines = output.matches("llama-warden").count();
        assert_eq!(lines > 0, matches!(value, Some("1" | "yes")), "{output}");
        assert_eq!(output.contains("fix cancel-nonstream active"), value == Some("1"), "{output}");
    }
    Ok(())
}
