//! Waiting on a predicate with a deadline. Level-triggered: the predicate is asked again and again, so nothing is missed.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use crate::Trouble;

/// How long to wait between two askings.
const STEP: Duration = Duration::from_millis(5);

/// Asks `holds` until it says yes.
///
/// # Errors
/// `what` did not happen within `deadline`.
pub async fn wait_until<F>(what: &str, deadline: Duration, mut holds: F) -> Result<(), Trouble>
where
    F: AsyncFnMut() -> bool,
{
    wait_for(what, deadline, async || holds().await.then_some(())).await
}

/// Asks `get` until it has a value.
///
/// # Errors
/// No value within `deadline`.
pub async fn wait_for<T, F>(what: &str, deadline: Duration, mut get: F) -> Result<T, Trouble>
where
    F: AsyncFnMut() -> Option<T>,
{
    let end = Instant::now() + deadline;
    loop {
        if let Ok(Some(value)) = timeout(deadline, get()).await {
            return Ok(value);
        }
        if Instant::now() >= end {
            return Err(Trouble::new(format!("not within {deadline:?}: {what}")));
        }
        sleep(STEP).await;
    }
}
