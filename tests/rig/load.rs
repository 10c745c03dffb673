//! Load for benchmarks: closed loops over kept connections, and statistics of their times.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::Request;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{HOST, HeaderValue};
use hyper_util::rt::TokioIo;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::{Http, Trouble};

/// Creates the request with this number.
pub type Make = fn(usize) -> Result<Request<Full<Bytes>>, Trouble>;

/// Runs clients, each with one kept connection, that send `each` requests one after the other. Returns the
/// times from the first byte sent to the last received, in no order. The time includes reopening a connection
/// that the server has closed.
///
/// # Errors
/// A request fails or gets no success.
pub async fn closed_loop(
    http: &Http,
    clients: usize,
    each: usize,
    make: Make,
) -> Result<Vec<Duration>, Trouble> {
    let mut set = JoinSet::new();
    for client in 0..clients {
        let http = http.clone();
        set.spawn(async move {
            let mut connection = Connection { http, open: None };
            let mut times = Vec::with_capacity(each);
            for number in 0..each {
                let request = make(client * each + number)?;
                let start = Instant::now();
                connection.send(request).await?;
                times.push(start.elapsed());
            }
            Ok::<_, Trouble>(times)
        });
    }
    let mut all = Vec::with_capacity(clients * each);
    while let Some(times) = set.join_next().await {
        all.extend(times??);
    }
    Ok(all)
}

struct Connection {
    http: Http,
    open: Option<(SendRequest<Full<Bytes>>, JoinSet<()>)>,
}

impl Connection {
    async fn send(&mut self, mut request: Request<Full<Bytes>>) -> Result<(), Trouble> {
        request.headers_mut().insert(HOST, HeaderValue::from_static("test.invalid"));
        if self.open.as_mut().is_none_or(|(sender, _)| sender.is_closed()) {
            let (sender, connection) = http1::handshake(TokioIo::new(self.http.connect().await?)).await?;
            let mut driver = JoinSet::new();
            driver.spawn(async move {
                let _ended = connection.await;
            });
            self.open = Some((sender, driver));
        }
        let Some((sender, _)) = self.open.as_mut() else { return Err(Trouble::new("no connection")) };
        sender.ready().await?;
        let response = sender.send_request(request).await?;
        let (status, closes) =
            (response.status(), response.headers().get("connection").is_some_and(|v| v == "close"));
        let body = response.into_body().collect().await?.to_bytes();
        if closes {
            self.open = None;
        }
        if status.is_success() {
            return Ok(());
        }
        Err(Trouble::new(format!("{status}: {}", String::from_utf8_lossy(&body))))
    }
}

/// Returns the time below which `share` (0 to 1) of the times are; zero without times.
pub fn quantile(times: &mut [Duration], share: f64) -> Duration {
    times.sort_unstable();
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an index into a vector of at most millions of times"
    )]
    let index = ((times.len().saturating_sub(1)) as f64 * share.clamp(0.0, 1.0)).round() as usize;
    times.get(index).copied().unwrap_or_default()
}

/// Returns the median; zero without figures.
pub fn median(figures: &mut [f64]) -> f64 {
    figures.sort_unstable_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or_default()
}

/// Converts a time to milliseconds.
pub fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_and_medians_are_values_that_occur() {
        let mut times: Vec<Duration> = (1..=100).rev().map(Duration::from_millis).collect();
        assert_eq!(quantile(&mut times, 0.5), Duration::from_millis(51));
        assert_eq!(quantile(&mut times, 0.99), Duration::from_millis(99));
        assert_eq!(quantile(&mut times, 1.0), Duration::from_millis(100));
        assert_eq!(quantile(&mut [], 0.5), Duration::ZERO);
        assert_eq!(median(&mut [3.0, 1.0, 2.0]).to_bits(), 2.0f64.to_bits());
    }
}
