//! `llama-warden diagnose --wrap`: the server runs under a tool, whose output is reported and whose processes
//! all end.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use warden_rig::process::{Kid, ProcessId};
use warden_rig::warden::SOON;
use warden_rig::{Context as _, Home, Outcome, Trouble, binaries, wait_until};

const PATIENCE: Duration = Duration::from_secs(240);

fn home() -> Result<Home, Trouble> {
    Home::with_fake(&json!({"ms_per_token": 1.0}))
}

/// A tool that runs the server as its child, and leaves an agent in another session.
fn forking(home: &Home) -> Result<PathBuf, Trouble> {
    let agent = home.path().join("agent");
    let text = format!(
        "#!/bin/sh\nsetsid sh -c 'echo $$ > {agent}.new; mv {agent}.new {agent}; exec sleep 1000' &\n\
         \"$@\"\necho \"the tool has spoken\"\n",
        agent = agent.display()
    );
    let tool = home.program("tool", text)?;
    Ok(tool)
}

fn command(tool: &str, requests: &str, wrapped: &Path) -> Vec<OsString> {
    let first = ["diagnose", "--wrap", tool, "--workload", "short-text", "--requests", requests, "--binary"];
    let mut all: Vec<OsString> = first.map(OsString::from).to_vec();
    all.push(wrapped.into());
    all.extend(["--", "-m", "model.gguf"].map(OsString::from));
    all
}

async fn agent(home: &Home) -> Result<ProcessId, Trouble> {
    let path = home.path().join("agent");
    wait_until("the agent has a number", SOON, async || path.exists()).await?;
    let pid = std::fs::read_to_string(path)?.trim().parse()?;
    ProcessId::of(pid).context("the agent runs")
}

#[tokio::test]
async fn killed_it_leaves_nothing_of_a_tool_that_forks_and_moves_away() -> Outcome {
    let home = home()?;
    let tool = forking(&home)?.display().to_string();
    let args = command(&tool, "100000", &binaries::fake_llama()?);
    let mut kid =
        Kid::start(&binaries::llama_warden()?, &args, &home.env, home.path(), home.path().join("log"))?;
    kid.says("short-text 1/100000", SOON).await?;
    let agent = agent(&home).await?;
    let tool = kid.children().into_iter().next().context("a tool")?;
    let servers = warden_rig::process::children_of(tool.pid);
    assert!(!servers.is_empty(), "{}", kid.output());
    kid.signal(Signal::KILL);
    assert_eq!(kid.exit(SOON).await?, -9);
    wait_until("nothing of the tool runs", SOON, async || {
        !agent.is_alive() && !tool.is_alive() && !servers.iter().any(|server| server.is_alive())
    })
    .await
}

#[tokio::test]
async fn at_the_end_of_a_leg_the_tool_has_its_say_and_what_it_left_behind_is_ended() -> Outcome {
    let home = home()?;
    let tool = forking(&home)?.display().to_string();
    let ran = home.warden(command(&tool, "4", &binaries::fake_llama()?), PATIENCE).await?;
    let agent = agent(&home).await;
    assert!(ran.stdout.contains("  the tool has spoken"), "{}", ran.all());
    assert!(ran.stderr.contains(&format!("{tool} runs in {}", home.path().display())), "{}", ran.all());
    if let Ok(agent) = agent {
        wait_until("the agent is gone", SOON, async || !agent.is_alive()).await?;
    }
    Ok(())
}

fn installed(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(name).is_file())
}

#[expect(clippy::print_stderr, reason = "a test that did nothing says so")]
fn skipped(tool: &str) {
    eprintln!("skipped: {tool} is not installed");
}

#[tokio::test]
async fn under_valgrind_a_server_does_its_work_and_the_report_of_valgrind_is_whole() -> Outcome {
    if !installed("valgrind") {
        skipped("valgrind");
        return Ok(());
    }
    let home = home()?;
    let tool = "valgrind --tool=massif --massif-out-file=massif.out";
    let ran = home.warden(command(tool, "4", &binaries::fake_llama()?), PATIENCE).await?;
    assert!(ran.stdout.lines().any(|line| line.starts_with("short-text  4 ")), "{}", ran.all());
    let report = std::fs::read_to_string(home.path().join("massif.out")).context(ran.all())?;
    assert!(report.contains("cmd: ") && report.contains("mem_heap_B="), "{report}");
    Ok(())
}

#[tokio::test]
async fn under_heaptrack_a_server_does_its_work_and_the_place_of_the_trace_is_told() -> Outcome {
    if !installed("heaptrack") {
        skipped("heaptrack");
        return Ok(());
    }
    let home = home()?;
    let ran = home.warden(command("heaptrack -o trace", "4", &binaries::fake_llama()?), PATIENCE).await?;
    assert!(ran.stdout.lines().any(|line| line.starts_with("short-text  4 ")), "{}", ran.all());
    let written = std::fs::read_dir(home.path())?.flatten();
    let traces: Vec<_> =
        written.filter(|file| file.file_name().to_string_lossy().starts_with("trace.")).collect();
    assert!(traces.iter().any(|file| file.metadata().is_ok_and(|facts| facts.len() > 0)), "{}", ran.all());
    assert!(ran.stdout.contains("trace."), "{}", ran.all());
    Ok(())
}
