//! Promise: a planned replacement keeps conversations warm. The ledger lists what was carried over and what
//! was not, and no data stays on disk.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use warden_rig::warden::{CHAT, SOON, Setup, json_lines};
use warden_rig::{Context as _, Outcome, Trouble, Warden, wait_until};

#[derive(Clone, Debug)]
pub(crate) struct Talk {
    messages: Vec<Value>,
}

impl Talk {
    fn new(n: usize) -> Self {
        let text: Vec<String> = (0..400).map(|word| format!("w{n}x{word}")).collect();
        Self { messages: vec![json!({ "role": "user", "content": text.join(" ") })] }
    }

    /// Sends the next turn; returns cached and evaluated prompt tokens.
    pub(crate) async fn turn(&mut self, warden: &Warden, streams: bool) -> Result<(u64, u64), Trouble> {
        let body = json!({ "model": "m", "messages": self.messages, "max_tokens": 8, "stream": streams });
        let (mut text, mut timings) = (String::new(), Value::Null);
        if streams {
            let mut flow = warden.http.stream(CHAT, &body).await?;
            while let Some(event) = flow.event().await? {
                let event: Value = serde_json::from_str(&event).unwrap_or_default();
                text.push_str(event["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
                if event["timings"].is_object() {
                    timings = event["timings"].clone();
                }
            }
        } else {
            let answer = warden.http.post(CHAT, &body).await?.json()?;
            answer["choices"][0]["message"]["content"].as_str().unwrap_or_default().clone_into(&mut text);
            timings = answer["timings"].clone();
        }
        self.messages.push(json!({ "role": "assistant", "content": text }));
        self.messages.push(json!({ "role": "user", "content": "and then" }));
        let counted = timings["cache_n"].as_u64().zip(timings["prompt_n"].as_u64());
        counted.context(format!("no timings: {timings}, {text:?}"))
    }
}

pub(crate) async fn started(script: &Value, lines: &str) -> Result<Warden, Trouble> {
    let lines = format!("on_death = \"continue\"\n{lines}");
    let warden = Setup::new()?.fake("m", script, &lines)?.start().await?;
    warden.until_ready(1).await?;
    Ok(warden)
}

pub(crate) async fn talks(warden: &Warden, count: usize) -> Result<Vec<Talk>, Trouble> {
    let mut all: Vec<Talk> = (0..count).map(Talk::new).collect();
    for (n, talk) in all.iter_mut().enumerate() {
        talk.turn(warden, n % 2 == 1).await?;
    }
    Ok(all)
}

/// The ledger's figures on the last replacement's conversations.
pub(crate) fn last(warden: &Warden) -> Result<Value, Trouble> {
    let entries = json_lines(&warden.recycles())?;
    let entry = entries.last().context("no entry")?;
    if !entry["failed"].is_null() {
        return Err(Trouble::new(format!("{entry}")));
    }
    Ok(entry["warm"].clone())
}

/// Waits until work after the replacement is done; returns its result.
async fn settled(warden: &Warden) -> Result<Value, Trouble> {
    let mut warm = Value::Null;
    wait_until("nothing is due behind the gate", SOON, async || {
        warm = warden.status("m").await.map(|model| model["warm"].clone()).unwrap_or_default();
        warm["later"] == 0
    })
    .await?;
    Ok(warm)
}

/// Directories in which processes may save slots.
fn directories(warden: &Warden) -> Vec<PathBuf> {
    let of = |backend: &warden_rig::process::ProcessId| {
        let args = backend.command_line();
        let at = args.iter().position(|arg| arg == "--slot-save-path")?;
        Some(PathBuf::from(args.get(at + 1)?))
    };
    warden.backends().iter().filter_map(of).collect()
}

pub(crate) fn files(directory: &Path) -> usize {
    std::fs::read_dir(directory).map_or(0, Iterator::count)
}

/// Sends a turn of each conversation, which must evaluate only new tokens.
pub(crate) async fn all_warm(warden: &Warden, talks: &mut [Talk]) -> Outcome {
    for (n, talk) in talks.iter_mut().enumerate() {
        let (cached, evaluated) = talk.turn(warden, n % 2 == 0).await?;
        assert!(cached > 400 && evaluated < 16, "conversation {n}: {cached} cached, {evaluated} evaluated");
    }
    Ok(())
}

async fn carried(replace: &str, kept: &str) -> Outcome {
    let mut warden = started(&json!({ "kept": kept }), &format!("replace = \"{replace}\"")).await?;
    let mut talks = talks(&warden, 3).await?;
    for _ in 0..2 {
        warden.restart("m", 1).await?;
        let warm = last(&warden)?;
        assert_eq!((&warm["conversations"], &warm["carried"]), (&json!(3), &json!(3)), "{warm}");
        assert!(warm["bytes"].as_u64().is_some_and(|bytes| bytes > 3 * 400 * 100), "{warm}");
        let directories = directories(&warden);
        assert_eq!(directories.len(), 1);
        assert_eq!(files(&directories[0]), 0, "files went as soon as they were read");
        assert_eq!(std::fs::metadata(&directories[0])?.permissions().mode() & 0o777, 0o700);
        all_warm(&warden, &mut talks).await?;
    }
    let metrics = ["llama_warden_warm_conversations_total{model=\"m\",outcome=\"carried\"} 6"];
    warden.until_metrics(&metrics).await?;
    let directory = directories(&warden).remove(0);
    assert_eq!(warden.terminate(SOON).await?, 0);
    assert!(!directory.exists());
    Ok(())
}

#[tokio::test]
async fn slots_go_along_in_sequence() -> Outcome {
    carried("sequential", "dense").await
}

#[tokio::test]
async fn slots_go_along_by_overlap() -> Outcome {
    carried("overlap", "dense").await
}

#[tokio::test]
async fn with_a_unified_cache_they_are_called_back_first() -> Outcome {
    carried("sequential", "unified").await
}

#[tokio::test]
async fn with_sliding_windows_prompts_are_evaluated_behind_the_gate_in_sequence() -> Outcome {
    let warden = started(&json!({ "kept": "windows" }), "replace = \"sequential\"").await?;
    let mut talks = talks(&warden, 3).await?;
    for round in 0..2 {
        warden.restart("m", 1).await?;
        let warm = last(&warden)?;
        assert_eq!((&warm["carried"], &warm["no_file"]), (&json!(0), &json!("not_reused")), "{warm}");
        // The second replacement knows what the first one learnt.
        assert_eq!(warm["bytes"] == 0, round == 1, "{warm}");
        let warm = settled(&warden).await?;
        assert_eq!((&warm["conversations"], &warm["evaluated"]), (&json!(3), &json!(3)), "{warm}");
        all_warm(&warden, &mut talks).await?;
    }
    Ok(())
}

#[tokio::test]
async fn with_sliding_windows_prompts_are_evaluated_before_the_gate_by_overlap() -> Outcome {
    let warden = started(&json!({ "kept": "windows" }), "replace = \"overlap\"").await?;
    let mut talks = talks(&warden, 3).await?;
    warden.restart("m", 1).await?;
    let warm = last(&warden)?;
    assert_eq!((&warm["evaluated"], &warm["later"]), (&json!(3), &json!(0)), "{warm}");
    all_warm(&warden, &mut talks).await
}

/// Setting that switches the fix `slot-checkpoints` on.
const CHECKPOINTS: &str = "mitigations = [\"slot-checkpoints\"]";

async fn carried_with_checkpoints(replace: &str) -> Outcome {
    let lines = format!("replace = \"{replace}\"\n{CHECKPOINTS}");
    let warden = started(&json!({ "kept": "windows" }), &lines).await?;
    let mut talks = talks(&warden, 3).await?;
    for _ in 0..2 {
        warden.restart("m", 1).await?;
        let warm = last(&warden)?;
        assert_eq!((&warm["carried"], &warm["no_file"]), (&json!(3), &Value::Null), "{warm}");
        // Slot files have some 100 bytes a token, and their checkpoints are as large.
        assert!(warm["bytes"].as_u64().is_some_and(|bytes| bytes > 2 * 3 * 400 * 100), "{warm}");
        assert_eq!(files(&directories(&warden)[0]), 0, "checkpoints went with their files");
        all_warm(&warden, &mut talks).await?;
    }
    Ok(())
}

#[tokio::test]
async fn with_saved_checkpoints_sliding_windows_go_along_in_sequence() -> Outcome {
    carried_with_checkpoints("sequential").await
}

#[tokio::test]
async fn with_saved_checkpoints_sliding_windows_go_along_by_overlap() -> Outcome {
    carried_with_checkpoints("overlap").await
}

#[tokio::test]
async fn checkpoints_count_for_the_bytes_of_slot_files() -> Outcome {
    let lines = format!("replace = \"sequential\"\nwarm_bytes = \"60KiB\"\n{CHECKPOINTS}");
    let warden = started(&json!({ "kept": "windows" }), &lines).await?;
    talks(&warden, 1).await?;
    warden.restart("m", 1).await?;
    let warm = last(&warden)?;
    assert_eq!((&warm["carried"], &warm["no_file"]), (&json!(0), &json!("room")), "{warm}");
    assert_eq!(files(&directories(&warden)[0]), 0);
    Ok(())
}

async fn failing(script: Value, why: &str) -> Outcome {
    let warden = started(&script, "replace = \"sequential\"").await?;
    let mut talks = talks(&warden, 2).await?;
    warden.restart("m", 1).await?;
    let warm = last(&warden)?;
    assert_eq!((&warm["carried"], &warm["no_file"]), (&json!(0), &json!(why)), "{warm}");
    assert_eq!(files(&directories(&warden)[0]), 0);
    assert_eq!(settled(&warden).await?["evaluated"], 2);
    all_warm(&warden, &mut talks).await
}

#[tokio::test]
async fn slots_that_cannot_be_saved_are_evaluated_again_and_the_reason_is_told() -> Outcome {
    failing(json!({ "kept": "dense", "save_fault": "error" }), "failed").await
}

#[tokio::test]
async fn an_answer_that_is_none_saves_nothing() -> Outcome {
    failing(json!({ "kept": "dense", "save_fault": "garbage" }), "failed").await
}

#[tokio::test]
async fn a_full_disk_is_seen_by_the_file() -> Outcome {
    failing(json!({ "kept": "dense", "save_fault": "full" }), "room").await
}

#[tokio::test]
async fn slots_that_cannot_be_restored_are_evaluated_again() -> Outcome {
    failing(json!({ "kept": "dense", "restore_fault": "error" }), "failed").await
}

#[tokio::test]
async fn a_slow_disk_holds_nobody_up() -> Outcome {
    failing(json!({ "kept": "dense", "save_ms": 60_000 }), "time").await
}

#[tokio::test]
async fn conversations_stay_on_their_replica_where_their_prompt_is_cached() -> Outcome {
    let lines = "replicas = 2\non_death = \"continue\"\nreplace = \"sequential\"";
    let warden = Setup::new()?.fake("m", &json!({ "kept": "dense" }), lines)?.start().await?;
    warden.until_ready(2).await?;
    // Eight conversations fill all slots of both replicas.
    let mut talks = talks(&warden, 8).await?;
    for _ in 0..3 {
        all_warm(&warden, &mut talks).await?;
    }
    talks.reverse();
    // Two at a time for each replica, so that none is much busier than the other.
    for four in talks.chunks_mut(4) {
        let turns = four.iter_mut().map(|talk| talk.turn(&warden, true));
        for turn in futures_util::future::join_all(turns).await {
            let (cached, evaluated) = turn?;
            assert!(cached > 400 && evaluated < 16, "four at once: {cached} cached, {evaluated} evaluated");
        }
    }
    warden.restart("m", 1).await?;
    all_warm(&warden, &mut talks).await
}

#[tokio::test]
async fn slot_files_keep_within_their_bytes() -> Outcome {
    let warden =
        started(&json!({ "kept": "dense" }), "replace = \"sequential\"\nwarm_bytes = \"60KiB\"").await?;
    talks(&warden, 3).await?;
    warden.restart("m", 1).await?;
    // The size of a token is unknown before the first file, which might be too large.
    let warm = last(&warden)?;
    assert_eq!((&warm["carried"], &warm["no_file"]), (&json!(0), &json!("room")), "{warm}");
    assert_eq!(warm["bytes"], 0, "{warm}");
    assert_eq!(settled(&warden).await?["evaluated"], 3);
    Ok(())
}

#[tokio::test]
async fn clients_cannot_save_slots_where_the_operator_did_not_say_so() -> Outcome {
    let warden = started(&json!({ "kept": "dense" }), "").await?;
    assert_eq!(directories(&warden).len(), 1, "it is for us alone");
    for path in [
        "/slots/0?action=save",
        "/slots/1?action=restore",
        "/slots/0?action=erase",
        "/%73lots/0?action=save",
        "/slots%2F0?action=save",
    ] {
        for name in ["x", "../x", "llama-warden-1-g1-0.slot"] {
            let answer = warden.http.post(path, &json!({ "filename": name })).await?;
            assert_eq!(answer.status.as_u16(), 501, "{path} {name}: {}", answer.text());
            let error = answer.json()?["error"].clone();
            assert_eq!(error["type"], "not_supported_error", "{error}");
        }
    }
    assert_eq!(files(&directories(&warden)[0]), 0);
    Ok(())
}

#[tokio::test]
async fn a_directory_of_the_operators_is_used_and_keeps_what_is_theirs() -> Outcome {
    let setup = Setup::new()?;
    let theirs = setup.home.path().join("theirs");
    std::fs::create_dir(&theirs)?;
    std::fs::write(theirs.join("chat.bin"), "[]")?;
    let args = format!(
        "replace = \"sequential\"\nargs = [\"-np\", \"4\", \"--slot-save-path\", \"{}\"]",
        theirs.display()
    );
    let lines = format!("on_death = \"continue\"\n{args}");
    let mut warden = setup.fake("m", &json!({ "kept": "dense" }), &lines)?.start().await?;
    warden.until_ready(1).await?;
    let mut talks = talks(&warden, 2).await?;
    let saved = warden.http.post("/slots/0?action=save", &json!({ "filename": "own.bin" })).await?;
    assert_eq!(saved.status.as_u16(), 200, "the operator has enabled it");
    warden.restart("m", 1).await?;
    assert_eq!(last(&warden)?["carried"], 2);
    all_warm(&warden, &mut talks).await?;
    // The running process's mark, next to the foreign files.
    wait_until("ours are gone", SOON, async || files(&theirs) == 3).await?;
    assert_eq!(warden.terminate(SOON).await?, 0);
    assert_eq!(files(&theirs), 2, "what is theirs is there");
    Ok(())
}

#[tokio::test]
async fn what_is_off_keeps_nothing() -> Outcome {
    let warden = started(&json!({ "kept": "dense" }), "replace = \"sequential\"\nwarm = \"off\"").await?;
    let mut talks = talks(&warden, 2).await?;
    assert!(directories(&warden).is_empty());
    warden.restart("m", 1).await?;
    assert!(last(&warden)?.is_null());
    assert_eq!(talks[0].turn(&warden, false).await?.0, 0);
    Ok(())
}

#[tokio::test]
async fn a_server_that_is_started_where_the_directory_is_not_starts_without() -> Outcome {
    let script = json!({ "kept": "dense", "no_slot_path": true });
    let lines = "replace = \"sequential\"\nlifecycle.backoff_first = \"20ms\"";
    let warden = started(&script, lines).await?;
    assert!(directories(&warden).is_empty());
    talks(&warden, 1).await?;
    warden.restart("m", 1).await?;
    assert_eq!(last(&warden)?["no_file"], "build");
    Ok(())
}

#[tokio::test]
async fn files_of_one_that_was_killed_go_at_the_next_start() -> Outcome {
    let mut warden =
        started(&json!({ "kept": "dense", "save_ms": 60_000 }), "replace = \"sequential\"").await?;
    talks(&warden, 1).await?;
    let directory = directories(&warden).remove(0);
    let saved = wait_until("a slot is being saved", SOON, async || files(&directory) == 1);
    tokio::select! {
        saved = saved => saved?,
        ran = warden.cli(&["restart", "m"]) => return Err(Trouble::new(format!("nothing was saved: {ran:?}"))),
    }
    warden.kid.signal(Signal::KILL);
    wait_until("it has ended", SOON, async || warden.kid.ended().is_some()).await?;
    assert_eq!(files(&directory), 1, "nobody could remove it");
    let name = std::fs::read_dir(&directory)?.next().context("no file")??;
    assert_eq!(name.metadata()?.permissions().mode() & 0o777, 0o600);
    let warden = warden.again().await?;
    warden.until_ready(1).await?;
    assert!(!directory.exists());
    Ok(())
}

#[tokio::test]
async fn what_goes_along_never_fails_a_request_that_comes_meanwhile() -> Outcome {
    for replace in ["sequential", "overlap"] {
        let script = json!({ "kept": "windows", "ms_per_prompt_token": 0.5 });
        let warden = started(&script, &format!("replace = \"{replace}\"")).await?;
        let mut talks = talks(&warden, 4).await?;
        let restarts = warden.restart("m", 3);
        let turns = async {
            for round in 0..12 {
                for talk in &mut talks {
                    talk.turn(&warden, round % 2 == 0).await?;
                }
            }
            Ok::<_, Trouble>(())
        };
        let (turns, restarts) = tokio::join!(turns, tokio::time::timeout(Duration::from_secs(120), restarts));
        turns?;
        restarts.context("restarts take too long")??;
        for entry in json_lines(&warden.recycles())? {
            assert_eq!((&entry["cut"], &entry["failed"]), (&json!(0), &Value::Null), "{entry}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_restore_whose_use_the_next_turn_disproves_is_not_waited_for_again() -> Outcome {
    // Each prompt takes two seconds, longer than the gate waits for the use of a restored slot.
    let script = json!({ "kept": "windows", "ms_per_prompt_token": 5 });
    let warden = started(&script, "replace = \"sequential\"").await?;
    let mut talks = talks(&warden, 2).await?;
    warden.restart("m", 1).await?;
    let warm = last(&warden)?;
    assert_eq!((&warm["carried"], &warm["unproven"]), (&json!(0), &json!(2)), "{warm}");
    // The gate has waited for the earlier conversation, which fake-llama has evaluated meanwhile.
    assert_eq!(talks[1].turn(&warden, false).await?.0, 0);
    talks[0].turn(&warden, false).await?;
    // Later replacements save no slots, and evaluate prompts when the process is idle.
    warden.restart("m", 1).await?;
    let warm = last(&warden)?;
    let told = (&warm["no_file"], &warm["bytes"], &warm["unproven"], &warm["later"]);
    assert_eq!(told, (&json!("not_reused"), &json!(0), &json!(0), &json!(2)), "{warm}");
    assert_eq!(settled(&warden).await?["evaluated"], 2);
    all_warm(&warden, &mut talks).await
}

#[tokio::test]
async fn what_had_no_time_to_show_its_use_is_not_called_useless() -> Outcome {
    let warden = started(&json!({ "kept": "dense" }), "replace = \"sequential\"").await?;
    let mut talks = talks(&warden, 2).await?;
    // The next process takes too long to accept a prompt.
    warden.script("m", &json!({ "prompt_ms": 3000 })).await?;
    warden.restart("m", 1).await?;
    let warm = last(&warden)?;
    assert_eq!((&warm["carried"], &warm["unproven"]), (&json!(0), &json!(2)), "{warm}");
    assert!(warm["no_file"].is_null(), "{warm}");
    warden.script("m", &json!({ "prompt_ms": 0 })).await?;
    all_warm(&warden, &mut talks).await?;
    warden.restart("m", 1).await?;
    let warm = last(&warden)?;
    assert_eq!(
        (&warm["carried"], &warm["no_file"]),
        (&json!(2), &Value::Null),
        "files are used again: {warm}"
    );
    all_warm(&warden, &mut talks).await
}

#[tokio::test]
async fn a_process_of_another_command_gets_prompts_and_no_files() -> Outcome {
    for replace in ["sequential", "overlap"] {
        let args =
            |context: u32| format!("replace = \"{replace}\"\nargs = [\"-np\", \"4\", \"-c\", \"{context}\"]");
        let mut warden = started(&json!({ "kept": "dense" }), &args(4096)).await?;
        let mut talks = talks(&warden, 2).await?;
        let changed = warden.setup.config().replace(&args(4096), &args(8192));
        warden.reload(&changed)?;
        wait_until("it is replaced", SOON, async || {
            json_lines(&warden.recycles()).is_ok_and(|entries| !entries.is_empty())
        })
        .await?;
        let warm = last(&warden)?;
        assert_eq!(
            (&warm["carried"], &warm["no_file"], &warm["bytes"]),
            (&json!(0), &json!("other"), &json!(0)),
            "{warm}"
        );
        assert_eq!(settled(&warden).await?["evaluated"], 2, "{replace}");
        all_warm(&warden, &mut talks).await?;
    }
    Ok(())
}

#[tokio::test]
async fn being_made_warm_ends_with_the_time_that_a_start_may_take() -> Outcome {
    // Each of four conversations takes two seconds, and the start timeout must leave time for later work.
    let script = json!({ "kept": "windows", "ms_per_prompt_token": 5 });
    let lines = "replace = \"overlap\"\nlifecycle.start_timeout = \"9s\"\nlifecycle.probe_timeout = \"1s\"";
    let warden = started(&script, lines).await?;
    let mut talks = talks(&warden, 4).await?;
    warden.restart("m", 1).await?;
    let warm = last(&warden)?;
    assert!(warm["later"].as_u64().is_some_and(|later| later >= 1), "{warm}");
    assert_eq!(settled(&warden).await?["evaluated"], 4);
    all_warm(&warden, &mut talks).await
}

#[tokio::test]
async fn who_dies_while_the_next_is_made_warm_is_followed_at_once() -> Outcome {
    // Longer than any wait here.
    let script = json!({ "kept": "windows", "ms_per_prompt_token": 20 });
    let warden = started(&script, "replace = \"overlap\"\nlifecycle.start_timeout = \"5m\"").await?;
    let all = talks(&warden, 4).await?;
    let old = warden.backends();
    let dies = async {
        wait_until("the next one is asked for the first prompt", SOON, async || {
            let lines = warden.ledger().lines().unwrap_or_default();
            lines.iter().any(|line| line.event == "begun" && line.pid != old[0].pid)
        })
        .await?;
        old[0].signal(Signal::KILL);
        let mut talk = Talk::new(9);
        talk.messages = vec![json!({ "role": "user", "content": "short" })];
        talk.turn(&warden, true).await
    };
    let (turn, restarted) = tokio::join!(dies, warden.cli(&["restart", "m"]));
    let (_, evaluated) = turn?;
    assert!(evaluated < 16, "{evaluated}");
    drop(restarted);
    wait_until("nothing is due behind the gate", SOON * 4, async || {
        warden.status("m").await.is_ok_and(|model| model["warm"].is_null() || model["warm"]["later"] == 0)
    })
    .await?;
    assert_eq!(all.len(), 4);
    Ok(())
}

/// Starts a model that is unloaded for another one, or after a second.
async fn left(lines: &str) -> Result<(Warden, Vec<Talk>, PathBuf), Trouble> {
    let lines = format!("preload = false\nlifecycle.stop_grace = \"5s\"\n{lines}");
    let setup = Setup::new()?.top("loading.max_loaded = 1\ninternal.loading.turn_least = \"100ms\"");
    let setup = setup.fake("m", &json!({ "kept": "dense" }), &lines)?;
    let warden = setup.fake("other", &json!({}), "preload = false\n")?.start().await?;
    let talks = talks(&warden, 3).await?;
    let directory = directories(&warden).remove(0);
    Ok((warden, talks, directory))
}

pub(crate) async fn unloaded(warden: &Warden) -> Outcome {
    wait_until("it is unloaded", SOON, async || {
        warden.state("m").await.is_ok_and(|state| state == "unloaded")
    })
    .await
}

#[tokio::test]
async fn a_model_that_left_for_another_one_comes_back_warm() -> Outcome {
    let (mut warden, mut talks, directory) = left("").await?;
    for _ in 0..2 {
        let body =
            json!({ "model": "other", "messages": [{ "role": "user", "content": "hi" }], "max_tokens": 2 });
        warden.http.post(CHAT, &body).await?.json()?;
        unloaded(&warden).await?;
        all_warm(&warden, &mut talks).await?;
        let events = warden.cli(&["events"]).await?.stdout;
        assert!(events.contains("loaded again: warm: 3 of 3"), "{events}");
    }
    // A restart on command loads the model, too.
    let body =
        json!({ "model": "other", "messages": [{ "role": "user", "content": "hi" }], "max_tokens": 2 });
    warden.http.post(CHAT, &body).await?.json()?;
    unloaded(&warden).await?;
    assert_eq!(warden.cli(&["restart", "m"]).await?.code, 0);
    all_warm(&warden, &mut talks).await?;
    assert!(!directory.exists(), "files go when they are used");
    assert_eq!(files(&directories(&warden)[0]), 0);
    warden
        .until_metrics(&["llama_warden_warm_conversations_total{model=\"m\",outcome=\"carried\"} 9"])
        .await?;
    assert_eq!(warden.terminate(SOON).await?, 0);
    Ok(())
}

#[tokio::test]
async fn what_a_model_left_is_private_and_goes_after_its_time_and_with_us() -> Outcome {
    // Long enough for checks on a busy machine.
    let (warden, mut talks, directory) = left("ttl = \"1s\"\nwarm_away = \"8s\"").await?;
    unloaded(&warden).await?;
    assert_eq!(files(&directory), 3);
    for file in std::fs::read_dir(&directory)? {
        assert_eq!(file?.metadata()?.permissions().mode() & 0o777, 0o600);
    }
    wait_until("nothing of it is left", SOON, async || !directory.exists()).await?;
    assert_eq!(talks[0].turn(&warden, false).await?.0, 0, "its conversations are forgotten");
    let events = warden.cli(&["events"]).await?.stdout;
    assert!(!events.contains("loaded again"), "{events}");

    let (mut warden, _, directory) = left("ttl = \"1s\"").await?;
    unloaded(&warden).await?;
    assert_eq!(files(&directory), 3);
    let config = warden.setup.config().replacen("ttl = \"1s\"", "ttl = \"1s\"\nwarm = \"off\"", 1);
    warden.reload(&config)?;
    wait_until("what is not allowed any more goes", SOON, async || !directory.exists()).await?;

    let (mut warden, _, directory) = left("ttl = \"1s\"").await?;
    unloaded(&warden).await?;
    assert_eq!(files(&directory), 3);
    assert_eq!(warden.terminate(SOON).await?, 0);
    assert!(!directory.exists());
    Ok(())
}

#[tokio::test]
async fn a_model_with_other_arguments_takes_nothing_from_the_one_that_left() -> Outcome {
    let (mut warden, mut talks, directory) = left("ttl = \"1s\"").await?;
    unloaded(&warden).await?;
    let config = warden.setup.config().replacen("\"-np\", \"4\"", "\"-np\", \"4\", \"-c\", \"2048\"", 1);
    let config = config.replacen("ttl = \"1s\"", "ttl = \"1s\"\nqueue.depth = 6", 1);
    warden.reload(&config)?;
    wait_until("it has read that", SOON, async || {
        warden.status("m").await.is_ok_and(|status| status["queue_depth"] == 6)
    })
    .await?;
    assert_eq!(talks[2].turn(&warden, false).await?.0, 0);
    wait_until("nothing of it is left", SOON, async || !directory.exists()).await?;
    Ok(())
}
