//! Streamed answers that share one HTTP/2 connection over TLS.

use std::net::SocketAddr;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::Value;
use tokio::task::JoinSet;

use crate::http::json_request;
use crate::sse::Events;
use crate::{Answer, Context as _, Identity, Trouble};

/// Connection; dropping it ends all its streams.
#[derive(Debug)]
pub struct Http2 {
    sender: SendRequest<Full<Bytes>>,
    origin: String,
    _driver: JoinSet<()>,
}

/// Stream whose first text has arrived.
#[derive(Debug)]
pub struct Begun {
    body: Incoming,
    events: Events,
    answer: Answer,
}

impl Http2 {
    /// # Errors
    /// The server does not listen, or does not speak HTTP/2.
    pub async fn over_tls(identity: &Identity, address: SocketAddr) -> Result<Self, Trouble> {
        let stream = identity.connect(address, &["h2"]).await?;
        let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await?;
        let mut driver = JoinSet::new();
        driver.spawn(async move { drop(connection.await) });
        Ok(Self { sender, origin: format!("https://localhost:{}", address.port()), _driver: driver })
    }

    /// Returns true if the server accepts no more streams, or is gone.
    pub fn is_closing(&self) -> bool {
        self.sender.is_closed() || !self.sender.is_ready()
    }

    /// Sends a request and reads up to the first text.
    ///
    /// # Errors
    /// The server refuses the request, or ends the stream before the first text.
    pub async fn begin(&self, path: &str, body: &Value) -> Result<Begun, Trouble> {
        let request = json_request(&format!("{}{path}", self.origin), body)?;
        let body = self.sender.clone().send_request(request).await?.into_body();
        let mut begun = Begun { body, events: Events::default(), answer: Answer::default() };
        while begun.answer.text.is_empty() {
            if !begun.piece().await? {
                return Err(Trouble::new("the stream has ended before its first token"));
            }
        }
        Ok(begun)
    }
}

impl Begun {
    /// Reads a piece; returns false at the end.
    async fn piece(&mut self) -> Result<bool, Trouble> {
        let Some(frame) = self.body.frame().await else { return Ok(false) };
        let events = frame.context("a frame")?.into_data().map(|data| self.events.feed(&data));
        for event in events.unwrap_or_default() {
            self.answer.event(&event);
        }
        Ok(true)
    }

    /// Reads the rest; returns the whole answer.
    ///
    /// # Errors
    /// The stream breaks off.
    pub async fn whole(mut self) -> Result<Answer, Trouble> {
        while self.piece().await? {}
        Ok(self.answer)
    }
}
