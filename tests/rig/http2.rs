//! Streams of answers that share one connection of HTTP/2 over TLS.

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

/// One connection. Dropping it ends all of its streams.
#[derive(Debug)]
pub struct Http2 {
    sender: SendRequest<Full<Bytes>>,
    origin: String,
    _driver: JoinSet<()>,
}

/// A stream of which the first text is here.
#[derive(Debug)]
pub struct Begun {
    body: Incoming,
    events: Events,
    answer: Answer,
}

impl Http2 {
    /// # Errors
    /// Nobody listens there, or does not speak it.
    pub async fn over_tls(identity: &Identity, address: SocketAddr) -> Result<Self, Trouble> {
        let stream = identity.connect(address, &["h2"]).await?;
        let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await?;
        let mut driver = JoinSet::new();
        driver.spawn(async move { drop(connection.await) });
        Ok(Self { sender, origin: format!("https://localhost:{}", address.port()), _driver: driver })
    }

    /// Whether the server has said that it takes no more streams, or is gone.
    pub fn is_closing(&self) -> bool {
        self.sender.is_closed() || !self.sender.is_ready()
    }

    /// Asks, and reads up to the first text.
    ///
    /// # Errors
    /// It is refused, or ends before that.
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
    /// Reads a piece; false: there is none.
    async fn piece(&mut self) -> Result<bool, Trouble> {
        let Some(frame) = self.body.frame().await else { return Ok(false) };
        let events = frame.context("a frame")?.into_data().map(|data| self.events.feed(&data));
        for event in events.unwrap_or_default() {
            self.answer.event(&event);
        }
        Ok(true)
    }

    /// All that its client has in the end.
    ///
    /// # Errors
    /// The stream is cut.
    pub async fn whole(mut self) -> Result<Answer, Trouble> {
        while self.piece().await? {}
        Ok(self.answer)
    }
}
