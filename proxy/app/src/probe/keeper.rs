//! Keeps the board up to date: reads facts of the fleet repeatedly, and makes metrics when a client wants
//! them. Both use a bounded share of a core, however many models there are: each rests in proportion to the
//! time that it took.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::board::{MetricsText, ProbeBoard};
use crate::admin::answer::AdminState;
use crate::admin::families::to_plain_text;
use crate::serve::manager::{LoopAnswers, run_watchdog};

/// Runs until `stop`. `/livez` fails if it gets stuck.
pub(crate) async fn keep_board(board: Arc<ProbeBoard>, admin: AdminState, stop: CancellationToken) {
    let work = async { tokio::join!(keep_facts(&board, &admin), keep_metrics(&board, &admin)) };
    tokio::select! {
        _ = work => {}
        () = stop.cancelled() => {}
    }
}

/// Checks that all loops that a request needs are responsive, until `stop`: then some of them end.
pub(crate) async fn watch_loops(
    board: Arc<ProbeBoard>,
    ask: impl Fn() -> LoopAnswers,
    stop: CancellationToken,
) {
    board.set_responsive(true);
    let turned = || {
        board.set_responsive(true);
        std::future::ready(())
    };
    run_watchdog(board.numbers().stuck, "probes will report llama-warden as stuck", ask, turned, stop).await;
    board.set_responsive(false);
}

async fn keep_facts(board: &ProbeBoard, admin: &AdminState) {
    loop {
        let begun = Instant::now();
        board.set_facts(admin.facts());
        sleep(pause_after(board, begun.elapsed(), board.numbers().look)).await;
    }
}

async fn keep_metrics(board: &ProbeBoard, admin: &AdminState) {
    loop {
        board.wait_wanted().await;
        let begun = Instant::now();
        // Without metrics of keys: their names are not for every client.
        let text = admin.metrics_text(false);
        let plain = Bytes::from(to_plain_text(&text));
        let pause = pause_after(board, begun.elapsed(), board.numbers().metrics_age);
        let fresh_until = Instant::now() + pause;
        board.set_metrics(MetricsText {
            fresh_until,
            good_until: fresh_until + pause,
            open_metrics: text.into(),
            plain,
        });
        sleep(pause).await;
    }
}

/// The pause after work that took this long.
fn pause_after(board: &ProbeBoard, took: Duration, least: Duration) -> Duration {
    let share = board.numbers().share.max(0.001);
    least.max(took.div_f64(share))
}
