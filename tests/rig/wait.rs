//! Waits for a condition with a deadline. The condition is checked repeatedly, so no event is missed.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use crate::Trouble;

/// Pause between two checks.
const STEP: Duration = Duration::from_millis(5);

/// Checks `holds` until it returns true.
///
/// # Errors
/// `what` did not happen within `deadline`.
pub async fn wait_until<F>(what: &str, deadline: Duration, mut holds: F) -> Result<(), Trouble>
where
    F: AsyncFnMut() -> bool,
{
    wait_for(what, deadline, async || holds().await.then_some(())).await
}

/// Calls `get` until it returns a value.
///
/// # Errors
/// There is no value within `deadline`.
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
