//! Repeated upgrades under load: answers are complete and equal, no process restarts, and memory, files and
//! threads of llama-warden do not grow.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use procfs::process::Process;
use serde_json::json;
use tokio::task::JoinSet;
use warden_rig::process::ProcessId;
use warden_rig::warden::{SOON, Setup, chat};
use warden_rig::{Context as _, Http, Outcome, Trouble, swarm, wait_until};

use super::{programs, until_alone, upgrade};

/// Tolerance for threads of blocking calls.
const THREADS: u64 = 8;
/// Tolerance for descriptors that are open for a moment.
const FILES: usize = 6;
/// Tolerance for what an allocator keeps; a leak in each of fifty upgrades would be more.
const ROOT: u64 = 3 << 20;
const SERVING: u64 = 10 << 20;

#[derive(Clone, Copy, Debug)]
struct Held {
    anon: u64,
    files: usize,
    threads: u64,
}

fn held(process: ProcessId) -> Result<Held, Trouble> {
    let process = Process::new(process.pid)?;
    let status = process.status()?;
    let anon = status.rssanon.context("RssAnon")? * 1024;
    Ok(Held { anon, files: process.fd_count()?, threads: status.threads })
}

fn is_flat(now: Held, before: Held, more: u64) -> bool {
    now.anon <= before.anon + more
        && now.files <= before.files + FILES
        && now.threads <= before.threads + THREADS
}

#[tokio::test]
async fn streams_go_on_byte_for_byte_through_ten_upgrades_and_nothing_grows() -> Outcome {
    through(10, 16).await
}

#[tokio::test]
#[ignore = "takes minutes: for whoever changes the hand-over"]
async fn streams_go_on_through_fifty_upgrades_and_nothing_grows() -> Outcome {
    through(50, 16).await
}

#[expect(clippy::print_stdout, reason = "figures for whoever runs it with --nocapture")]
async fn through(upgrades: usize, clients: usize) -> Outcome {
    let script = json!({"ms_per_token": 5});
    let args = "args = [\"-np\", \"16\", \"--metrics\"]\nreplicas = 2";
    let warden = Setup::new()?.fake("m", &script, args)?.start().await?;
    let before = warden.until_ready(2).await?;
    let root = ProcessId::of(warden.kid.pid()).context("it runs")?;
    let (over, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let mut asking = JoinSet::new();
    for client in 0..clients {
        asking.spawn(keep_asking(warden.http.clone(), client, Arc::clone(&over), Arc::clone(&done)));
    }
    let mut first = None;
    for number in 0..upgrades {
        upgrade(&warden).await.context(format!("upgrade {number}"))?;
        done.fetch_add(1, Ordering::SeqCst);
        if number == 1 {
            // The first program has finished its own requests, and only forks from now on.
            let serving = until_alone(&warden).await?;
            first = Some((held(root)?, held(serving)?));
        }
    }
    over.store(true, Ordering::SeqCst);
    let (mut streams, mut across) = (0, 0);
    while let Some(asked) = asking.join_next().await {
        let (all, some) = asked??;
        assert!(all > 0);
        (streams, across) = (streams + all, across + some);
    }
    // Nearly as many streams as clients run at any time.
    assert!(across >= upgrades * clients / 4, "{across} of {streams} streams went on through an upgrade");
    assert_eq!(warden.until_ready(2).await?, before, "the same processes");
    let serving = until_alone(&warden).await?;
    assert_eq!(programs(&warden), [serving]);
    let (root_first, serving_first) = first.context("there were several upgrades")?;
    let mut last = (root_first, serving_first);
    let flat = wait_until("memory, files and threads are as at first", SOON, async || {
        let (Ok(of_root), Ok(of_serving)) = (held(root), held(serving)) else { return false };
        last = (of_root, of_serving);
        is_flat(of_root, root_first, ROOT) && is_flat(of_serving, serving_first, SERVING)
    });
    let flat = flat.await;
    let told = format!(
        "{upgrades} upgrades, {streams} streams, {across} of them through one: {last:?}; after two of them: {root_first:?} {serving_first:?}"
    );
    println!("{told}");
    flat.context(told)
}

/// Sends streams one after the other, each twice, until `over`. Returns their number, and the number that
/// outlasted an upgrade.
async fn keep_asking(
    http: Http,
    client: usize,
    over: Arc<AtomicBool>,
    done: Arc<AtomicUsize>,
) -> Result<(usize, usize), Trouble> {
    let (mut asked, mut across) = (0, 0);
    while !over.load(Ordering::SeqCst) {
        let (name, words) = (format!("c{client}-{asked}"), format!("say it {asked} times"));
        let mut texts = Vec::new();
        for name in [name.clone(), format!("{name}-again")] {
            let before = done.load(Ordering::SeqCst);
            texts.push(swarm::answer(&http, &chat(&name, "m", &words, 60, true)).await?.text);
            across += usize::from(done.load(Ordering::SeqCst) > before);
        }
        if texts[0] != texts[1] {
            return Err(Trouble::new(format!("{name}: {texts:?}")));
        }
        asked += 2;
    }
    Ok((asked, across))
}
