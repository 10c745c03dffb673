//! Requests in the file of `LLAMA_WARDEN_RECLAIM`: each process gives memory back at a safe point or not at
//! all, answers in its own block, and ignores old requests.

use std::os::unix::fs::FileExt as _;
use std::path::Path;

use warden_rig::{Context as _, Outcome, Trouble, wait_for};

use super::build::{Flavour, Shape, binary, heap};
use super::{BUDGET, CAP, INTERVAL, LONG, RECLAIM, RESET, RESET_INTERVAL, Run, TRIM, scenario, start};

/// Runs a scenario in these shapes and flavours, each with its own file, because two processes would both
/// answer.
async fn alone(name: &str, pools: &str, shapes: &[Shape], env: &[(&str, &str)]) -> Outcome {
    for shape in shapes {
        for flavour in Flavour::of(*shape) {
            let Some(program) = binary(*shape, flavour).await? else { continue };
            let folder = tempfile::tempdir()?;
            let file = folder.path().join("reclaim");
            let env = [env, &[(RECLAIM, file.to_str().context("a path")?)]].concat();
            let title = format!("{name} {pools} in shape {shape:?}, {flavour:?}");
            start(&program, &[name, pools], &env, title)?.succeeds().await?;
        }
    }
    Ok(())
}

async fn with_both_pools(name: &str, shapes: &[Shape]) -> Outcome {
    for pools in ["legacy", "vmm"] {
        alone(name, pools, shapes, &[]).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_server_at_work_gives_back_what_is_asked_for_at_the_end_of_a_computation() -> Outcome {
    with_both_pools("reclaim_busy", &Shape::ALL).await
}

#[tokio::test]
async fn an_idle_server_gives_back_what_is_asked_for_again_and_again_and_learns_nothing_of_it() -> Outcome {
    with_both_pools("reclaim_idle", &Shape::WITH_LOCK).await
}

#[tokio::test]
async fn in_the_middle_of_a_computation_nothing_goes_and_afterwards_only_what_was_asked_for() -> Outcome {
    alone("reclaim_only", "legacy", &Shape::WITH_IDLE_GRAPHS, &[]).await
}

#[tokio::test]
async fn under_a_capture_nothing_goes_the_answer_says_so_and_the_pauses_between_tries_stay() -> Outcome {
    alone("reclaim_capture", "legacy", &Shape::WITH_IDLE_GRAPHS, &[]).await
}

#[tokio::test]
async fn a_pool_in_use_stays_and_the_rest_goes() -> Outcome {
    alone("reclaim_in_use", "legacy", &Shape::WITH_LOCK, &[]).await
}

#[tokio::test]
async fn a_handle_that_could_not_be_had_again_stays_and_the_answer_says_so() -> Outcome {
    alone("reclaim_low_memory", "legacy", &Shape::WITH_LOCK, &[]).await
}

#[tokio::test]
async fn an_old_request_garbage_a_torn_one_and_a_cut_file_do_nothing_and_a_new_one_is_done_after_each()
-> Outcome {
    let env = [(BUDGET, "1"), (INTERVAL, "1000")];
    alone("reclaim_garbage", "legacy", &[Shape::One, Shape::Spaces, Shape::Fork], &env).await?;
    alone("reclaim_other_version", "legacy", &[Shape::One, Shape::Spaces], &env).await
}

#[tokio::test]
async fn requests_come_while_two_threads_compute_and_capture() -> Outcome {
    alone("reclaim_race", "legacy", &Shape::WITH_MAP, &[]).await?;
    let all = [(CAP, "4"), (TRIM, "1"), (BUDGET, "1"), (INTERVAL, "1"), (RESET, "10"), (RESET_INTERVAL, "1")];
    alone("reclaim_race", "vmm", &Shape::WITH_MAP, &all).await
}

#[tokio::test]
async fn a_file_that_is_not_there_is_told_once_and_costs_nothing_else() -> Outcome {
    let runs = scenario(
        "everything",
        "legacy",
        &[Shape::Spaces],
        &[
            (RECLAIM, "/nowhere/reclaim"),
            (CAP, "4"),
            (BUDGET, "1"),
            (INTERVAL, "1"),
            (RESET, "10"),
            (RESET_INTERVAL, "1"),
        ],
    )
    .await?;
    for (run, output) in runs {
        let told =
            output.matches("nothing is given back on demand: /nowhere/reclaim is not to be had").count();
        assert!(told <= 1, "{}: {output}", run.name);
    }
    Ok(())
}

const BLOCK: u64 = 64;
const CUDA: u64 = 2 + 16;

/// Creates the file as `docs/patches.md` describes it.
fn make(path: &Path) -> Result<std::fs::File, Trouble> {
    let file = std::fs::OpenOptions::new().create_new(true).read(true).write(true).open(path)?;
    file.set_len(BLOCK * (2 + 2 * 16))?;
    let mut header = b"LWRECL1\0".to_vec();
    header.extend(1_u32.to_ne_bytes());
    header.extend(16_u32.to_ne_bytes());
    file.write_all_at(&header, 0)?;
    Ok(file)
}

fn check(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

fn ask(file: &std::fs::File, seq: u64, what: u32) -> Outcome {
    let mut block = seq.to_ne_bytes().to_vec();
    block.extend(what.to_ne_bytes());
    block.extend(60_000_u32.to_ne_bytes());
    block.resize(56, 0);
    block.extend(check(&block).to_ne_bytes());
    Ok(file.write_all_at(&block, BLOCK)?)
}

/// Request, result and process of an answer in a block; `None` without one.
fn answer(file: &std::fs::File, block: u64) -> Option<(u64, u16, u32)> {
    let mut bytes = [0; 64];
    file.read_exact_at(&mut bytes, block * BLOCK).ok()?;
    let word = |at: usize| Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    (word(56)? == check(bytes.get(..56)?)).then_some(())?;
    let result = u16::from_ne_bytes(bytes.get(44..46)?.try_into().ok()?);
    let pid = u32::from_ne_bytes(bytes.get(48..52)?.try_into().ok()?);
    Some((word(0)?, result, pid))
}

#[tokio::test]
async fn of_several_processes_with_one_file_each_answers_in_a_block_of_its_own() -> Outcome {
    let program = binary(Shape::Spaces, Flavour::Plain).await?.context("it needs no sanitizer")?;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("reclaim");
    let file = make(&path)?;
    let env = [(RECLAIM, path.to_str().context("a path")?)];
    let mut runs: Vec<Run> = Vec::new();
    for block in 0..3 {
        let run = start(&program, &["reclaim_held", "legacy"], &env, format!("reclaim_held {block}"))?;
        wait_for("a block is taken", LONG, async || answer(&file, CUDA + block)).await?;
        runs.push(run);
    }
    // The second process has ended, and the next one gets its block.
    drop(runs.remove(1));
    let last = start(&program, &["reclaim_held", "legacy"], &env, "reclaim_held again".to_owned())?;
    let before = answer(&file, CUDA + 1).context("the one that is gone")?.2;
    wait_for("its block is taken", LONG, async || {
        answer(&file, CUDA + 1).filter(|(_, _, pid)| *pid != before)
    })
    .await?;
    runs.push(last);
    ask(&file, 1, 7)?;
    let mut processes = Vec::new();
    for block in 0..3 {
        let (_, how, pid) = wait_for("an answer", LONG, async || {
            answer(&file, CUDA + block).filter(|(seq, how, _)| *seq == 1 && *how != 0)
        })
        .await?;
        assert_eq!(how, 1, "done");
        processes.push(pid);
    }
    processes.sort_unstable();
    processes.dedup();
    assert_eq!(processes.len(), 3);
    assert_eq!(answer(&file, CUDA + 3), None);
    std::fs::write(folder.path().join("reclaim.go"), "")?;
    for run in &mut runs {
        run.succeeds().await?;
    }
    Ok(())
}

#[tokio::test]
async fn the_heap_goes_back_when_it_is_asked_for_and_not_twice_in_a_moment() -> Outcome {
    for flavour in [Flavour::Plain, Flavour::Thread] {
        let Some(program) = heap(flavour).await? else { continue };
        start(&program, &["inert"], &[], "inert".to_owned())?.succeeds().await?;
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("reclaim");
        let env = [(RECLAIM, path.to_str().context("a path")?)];
        let output = start(&program, &["heap"], &env, format!("heap {flavour:?}"))?.succeeds().await?;
        assert!(output.contains("llama-warden: fix reclaim-heap active: "), "{output}");
        let bytes = output.lines().find_map(|line| line.strip_prefix("bytes ")?.parse::<u64>().ok());
        // A sanitizer's allocator has nothing to give back.
        assert!(flavour != Flavour::Plain || bytes > Some(32 << 20), "{output}");
    }
    Ok(())
}
