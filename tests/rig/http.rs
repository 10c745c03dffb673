//! HTTP client for tests: one connection per request, over TCP or a Unix socket, without retries, redirects
//! and proxy variables. Dropping a [`Flow`] closes its connection, as a client that leaves.

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

/// Address to send requests to.
#[derive(Debug, Clone)]
pub enum Http {
    /// A TCP address.
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
    /// TLS, with a server that has this certificate.
    Tls(SocketAddr, Box<Identity>),
}

/// Complete answer.
#[derive(Debug, Clone)]
pub struct Whole {
    /// Status of the answer.
    pub status: StatusCode,
    /// Headers of the answer.
    pub headers: HeaderMap,
    /// Body of the answer.
    pub body: Bytes,
}

impl Whole {
    /// Parses the body as JSON.
    ///
    /// # Errors
    /// The body is no JSON.
    pub fn json(&self) -> Result<Value, Trouble> {
        serde_json::from_slice(&self.body).context(format!("{} {:?}", self.status, self.text()))
    }

    /// Returns the body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// Returns a header, or an empty text.
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// Returns the answer as a client understands it, streamed or not.
    ///
    /// # Errors
    /// The body is neither JSON nor events.
    pub fn answer(&self) -> Result<Answer, Trouble> {
        if self.header("content-type").starts_with("text/event-stream") {
            return Ok(Answer::from_events(Events::default().feed(&self.body)));
        }
        Ok(Answer::from_whole(&self.json()?))
    }
}

impl Http {
    /// Client of a Unix socket.
    pub fn unix(path: &Path) -> Self {
        Self::Unix(path.to_owned())
    }

    /// Opens a new connection.
    ///
    /// # Errors
    /// The server does not listen.
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

    /// Opens a connection for raw bytes.
    ///
    /// # Errors
    /// The server does not listen.
    pub async fn raw(&self) -> Result<Raw, Trouble> {
        Ok(Raw { socket: self.connect().await? })
    }

    /// Sends a request and waits for the head of the answer.
    ///
    /// # Errors
    /// The connection fails before the head.
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

    /// Sends a GET.
    ///
    /// # Errors
    /// The same as for [`Self::send`].
    pub async fn get(&self, target: &str) -> Result<Whole, Trouble> {
        self.send(Request::get(target).body(Full::default())?).await
    }

    /// Sends a POST of JSON.
    ///
    /// # Errors
    /// The same as for [`Self::send`].
    pub async fn post(&self, target: &str, body: &Value) -> Result<Whole, Trouble> {
        self.send(json_request(target, body)?).await
    }

    /// Sends a POST of JSON; returns at the head of the answer.
    ///
    /// # Errors
    /// The same as for [`Self::open`].
    pub async fn stream(&self, target: &str, body: &Value) -> Result<Flow, Trouble> {
        self.open(json_request(target, body)?).await
    }
}

/// Creates a POST of JSON.
///
/// # Errors
/// `target` is no request target.
pub fn json_request(target: &str, body: &Value) -> Result<Request<Full<Bytes>>, Trouble> {
    let request =
        Request::builder().method(Method::POST).uri(target).header(CONTENT_TYPE, "application/json");
    Ok(request.body(Full::new(Bytes::from(body.to_string())))?)
}

/// Answer whose head has arrived. Drop it to leave early; stop reading it to be a slow client.
#[derive(Debug)]
pub struct Flow {
    response: Response<Incoming>,
    // Aborted on drop, which closes the connection.
    driver: JoinSet<()>,
    events: Events,
    ready: std::collections::VecDeque<String>,
}

impl Flow {
    /// Status of the answer.
    pub fn status(&self) -> StatusCode {
        self.response.status()
    }

    /// Headers of the answer.
    pub fn headers(&self) -> &HeaderMap {
        self.response.headers()
    }

    /// Returns the next piece of the body; `None` at its proper end.
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

    /// Returns the data of the next event; `None` at the proper end of the body.
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

    /// Reads the rest of the events; also returns the error that ended the body early.
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

    /// Reads the whole answer.
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

/// Connection for raw bytes.
pub struct Raw {
    socket: Box<dyn Socket>,
}

impl Raw {
    /// Sends bytes.
    ///
    /// # Errors
    /// The peer has closed the connection.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), Trouble> {
        self.socket.write_all(bytes).await?;
        self.socket.flush().await?;
        Ok(())
    }

    /// Closes the connection for writing.
    ///
    /// # Errors
    /// The peer has closed the connection.
    pub async fn half_close(&mut self) -> Result<(), Trouble> {
        Ok(self.socket.shutdown().await?)
    }

    /// Reads some bytes; empty at the end of the connection, also after a reset.
    ///
    /// # Errors
    /// No bytes arrive within `deadline`.
    pub async fn read(&mut self, deadline: Duration) -> Result<Vec<u8>, Trouble> {
        let mut bytes = vec![0; 64 * 1024];
        let read = timeout(deadline, self.socket.read(&mut bytes)).await;
        let length = read.context(format!("no byte within {deadline:?}"))?.unwrap_or(0);
        bytes.truncate(length);
        Ok(bytes)
    }

    /// Reads until the peer closes the connection.
    ///
    /// # Errors
    /// The peer does not close within `deadline`.
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
