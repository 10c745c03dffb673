//! A client for tests: one connection per request, over TCP or a Unix socket, no retries, no redirects, no proxy
//! variables. What it starts ends when it is dropped: dropping a [`Flow`] is a client that leaves.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::header::{CONTENT_TYPE, HOST, HeaderMap};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::sse::{Answer, Events};
use crate::{Context as _, Identity, Trouble};

/// Any byte stream.
pub trait Socket: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Socket for T {}

/// Where to send requests.
#[derive(Debug, Clone)]
pub enum Http {
    /// A TCP address.
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
    /// TLS, to whoever has this certificate.
    Tls(SocketAddr, Box<Identity>),
}

/// A whole answer.
#[derive(Debug, Clone)]
pub struct Whole {
    /// Its status.
    pub status: StatusCode,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its body.
    pub body: Bytes,
}

impl Whole {
    /// The body as JSON.
    ///
    /// # Errors
    /// It is none.
    pub fn json(&self) -> Result<Value, Trouble> {
        serde_json::from_slice(&self.body).context(format!("{} {:?}", self.status, self.text()))
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// One header, or an empty text.
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// What a client makes of it, whether it is a stream or not.
    ///
    /// # Errors
    /// It is neither JSON nor events.
    pub fn answer(&self) -> Result<Answer, Trouble> {
        if self.header("content-type").starts_with("text/event-stream") {
            return Ok(Answer::from_events(Events::default().feed(&self.body)));
        }
        Ok(Answer::from_whole(&self.json()?))
    }
}

impl Http {
    /// Over a Unix socket.
    pub fn unix(path: &Path) -> Self {
        Self::Unix(path.to_owned())
    }

    /// A fresh connection.
    ///
    /// # Errors
    /// Nobody listens.
    pub async fn connect(&self) -> Result<Box<dyn Socket>, Trouble> {
        Ok(match self {
            Self::Tcp(address) => {
                let socket = TcpStream::connect(address).await.context(address)?;
                socket.set_nodelay(true)?;
                Box::new(socket)
            }
            Self::Unix(path) => Box::new(UnixStream::connect(path).await.context(path.display())?),
            Self::Tls(address, identity) => Box::new(identity.connect(*address, &["http/1.1"]).await?),
        })
    }

    /// A connection to write bytes of your own on.
    ///
    /// # Errors
    /// Nobody listens.
    pub async fn raw(&self) -> Result<Raw, Trouble> {
        Ok(Raw { socket: self.connect().await? })
    }

    /// Sends a request and waits for the head of its answer.
    ///
    /// # Errors
    /// The connection fails before there is a head.
    pub async fn open(&self, mut request: Request<Full<Bytes>>) -> Result<Flow, Trouble> {
        if !request.headers().contains_key(HOST) {
            request.headers_mut().insert(HOST, hyper::header::HeaderValue::from_static("test.invalid"));
        }
        let what = format!("{} {}", request.method(), request.uri());
        let (mut sender, connection) = http1::handshake(TokioIo::new(self.connect().await?)).await?;
        let mut driver = JoinSet::new();
        driver.spawn(async move {
            let _ended = connection.await;
        });
        let response = sender.send_request(request).await.context(what)?;
        Ok(Flow { response, driver, events: Events::default(), ready: std::collections::VecDeque::new() })
    }

    /// Sends a request and waits for the whole answer.
    ///
    /// # Errors
    /// The connection fails before the end of the answer.
    pub async fn send(&self, request: Request<Full<Bytes>>) -> Result<Whole, Trouble> {
        self.open(request).await?.whole().await
    }

    /// GET.
    ///
    /// # Errors
    /// As [`Self::send`].
    pub async fn get(&self, target: &str) -> Result<Whole, Trouble> {
        self.send(Request::get(target).body(Full::default())?).await
    }

    /// POST of JSON.
    ///
    /// # Errors
    /// As [`Self::send`].
    pub async fn post(&self, target: &str, body: &Value) -> Result<Whole, Trouble> {
        self.send(json_request(target, body)?).await
    }

    /// POST of JSON; returns at the head of the answer.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn stream(&self, target: &str, body: &Value) -> Result<Flow, Trouble> {
        self.open(json_request(target, body)?).await
    }
}

/// A POST of JSON.
///
/// # Errors
/// `target` is no request target.
pub fn json_request(target: &str, body: &Value) -> Result<Request<Full<Bytes>>, Trouble> {
    let request =
        Request::builder().method(Method::POST).uri(target).header(CONTENT_TYPE, "application/json");
    Ok(request.body(Full::new(Bytes::from(body.to_string())))?)
}

/// An answer whose head has come. Drop it to leave early; do not ask it for anything to be a slow reader.
#[derive(Debug)]
pub struct Flow {
    response: Response<Incoming>,
    // Aborted on drop, which closes the connection.
    driver: JoinSet<()>,
    events: Events,
    ready: std::collections::VecDeque<String>,
}

impl Flow {
    /// Its status.
    pub fn status(&self) -> StatusCode {
        self.response.status()
    }

    /// Its headers.
    pub fn headers(&self) -> &HeaderMap {
        self.response.headers()
    }

    /// The next piece of the body as it came; `None` at its proper end.
    ///
    /// # Errors
    /// The body ended in the middle.
    pub async fn piece(&mut self) -> Result<Option<Bytes>, Trouble> {
        while let Some(frame) = self.response.body_mut().frame().await {
            if let Ok(data) = frame?.into_data() {
                return Ok(Some(data));
            }
        }
        Ok(None)
    }

    /// The data of the next event; `None` at the proper end of the body.
    ///
    /// # Errors
    /// The body ended in the middle.
    pub async fn event(&mut self) -> Result<Option<String>, Trouble> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(Some(event));
            }
            let Some(piece) = self.piece().await? else { return Ok(None) };
            self.ready.extend(self.events.feed(&piece));
        }
    }

    /// Everything that still comes, and how it ended.
    pub async fn rest(&mut self) -> (Answer, Result<(), Trouble>) {
        let mut answer = Answer::default();
        loop {
            match self.event().await {
                Ok(Some(event)) => answer.event(&event),
                Ok(None) => return (answer, Ok(())),
                Err(cut) => return (answer, Err(cut)),
            }
        }
    }

    /// The whole answer.
    ///
    /// # Errors
    /// The body ended in the middle.
    pub async fn whole(self) -> Result<Whole, Trouble> {
        let (head, body) = self.response.into_parts();
        let body = body.collect().await.context("body")?.to_bytes();
        drop(self.driver);
        Ok(Whole { status: head.status, headers: head.headers, body })
    }
}

/// A connection with nothing between the test and the bytes.
pub struct Raw {
    socket: Box<dyn Socket>,
}

impl Raw {
    /// Sends bytes.
    ///
    /// # Errors
    /// The peer has closed.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), Trouble> {
        self.socket.write_all(bytes).await?;
        self.socket.flush().await?;
        Ok(())
    }

    /// Closes our side for writing.
    ///
    /// # Errors
    /// The peer has closed.
    pub async fn half_close(&mut self) -> Result<(), Trouble> {
        Ok(self.socket.shutdown().await?)
    }

    /// Some bytes; empty at the end of the connection (also when it is reset).
    ///
    /// # Errors
    /// Nothing comes within `deadline`.
    pub async fn read(&mut self, deadline: Duration) -> Result<Vec<u8>, Trouble> {
        let mut bytes = vec![0; 64 * 1024];
        let read = timeout(deadline, self.socket.read(&mut bytes)).await;
        let length = read.context(format!("no byte within {deadline:?}"))?.unwrap_or(0);
        bytes.truncate(length);
        Ok(bytes)
    }

    /// Everything until the peer closes.
    ///
    /// # Errors
    /// It does not within `deadline`.
    pub async fn to_end(&mut self, deadline: Duration) -> Result<String, Trouble> {
        let all = async {
            let mut all = Vec::new();
            loop {
                let bytes = self.read(deadline).await?;
                if bytes.is_empty() {
                    return Ok::<_, Trouble>(all);
                }
                all.extend(bytes);
            }
        };
        let all = timeout(deadline, all).await.context(format!("still open after {deadline:?}"))??;
        Ok(String::from_utf8_lossy(&all).into_owned())
    }
}
