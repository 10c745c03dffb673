//! Keeps the board up to date: reads the fleet's facts repeatedly, and makes metrics when a client wants
//! them. Each task pauses in proportion to the time of its last work, to use only a bounded share of a core.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::board::{MetricsText, ProbeBoard};
use super::watchdog::{LoopAnswers, run_watchdog};
use crate::metrics::families::to_plain_text;
use crate::state::AdminState;

/// If this task gets stuck, `/livez` fails.
pub async fn keep_board(board: Arc<ProbeBoard>, admin: AdminState, stop: CancellationToken) {
    let work = async { tokio::join!(keep_facts(&board, &admin), keep_metrics(&board, &admin)) };
    tokio::select! {
        _ = work => {}
        () = stop.cancelled() => {}
    }
}

/// Checks all event loops that a request needs. Ends with `stop`, because some of the loops then end.
pub async fn watch_loops(board: Arc<ProbeBoard>, ask: impl Fn() -> LoopAnswers, stop: CancellationToken) {
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
        // Omit the metrics of API keys: not every client may see the names of keys.
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

fn pause_after(board: &ProbeBoard, took: Duration, least: Duration) -> Duration {
    let share = board.numbers().share.max(0.001);
    least.max(took.div_f64(share))
}
