//! The command line's client of the admin socket.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use http::header::HOST;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use reqwest::{Method, Url};
use rustix::process::geteuid;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use warden_supervisor::trusted_path;

use crate::error::AdminError;
use crate::instance::{self, LocatedInstance};
use crate::status::AdminStatus;

/// Connecting takes no time unless the accept queue is full. An instance whose queue stays full hangs.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Pause between attempts to connect to a socket whose accept queue is full.
const QUEUE_PAUSE: Duration = Duration::from_millis(20);
/// In bytes, of a whole answer or a streamed line. The status of a thousand models has a few MiB.
const LARGEST_ANSWER: usize = 32 << 20;
const ROOT: u32 = 0;

/// A client of the admin socket of one instance.
pub struct AdminClient {
    socket: PathBuf,
    /// User who runs the instance; `None` if the operator named the socket.
    owner: Option<u32>,
}

/// Finds the instance to talk to: the socket `named`, else the only instance known to the state directory,
/// else the only one with a pointer file in `places`. `address` selects one of several instances.
///
/// # Errors
/// No instance is found, or several are.
pub fn find_instance(
    named: Option<PathBuf>,
    state: &Path,
    places: &[PathBuf],
    address: Option<&str>,
) -> Result<AdminClient, AdminError> {
    if let Some(socket) = named {
        return Ok(AdminClient::new(socket));
    }
    choose_instance(&instance::nearest_instances(state, places), address)
}

fn choose_instance(found: &[LocatedInstance], address: Option<&str>) -> Result<AdminClient, AdminError> {
    if let Some(meant) = found.iter().find(|one| Some(one.instance.address.as_str()) == address) {
        return Ok(AdminClient::from_located(meant));
    }
    match found {
        [] => Err(AdminError::hinted(
            "no llama-warden is running here",
            "start one with `llama-warden serve`, or name its socket with --admin-socket",
        )),
        [only] => Ok(AdminClient::from_located(only)),
        several => {
            let listed = several.iter().map(|LocatedInstance { instance: one, .. }| {
                format!("\n  pid {} on http://{}: --admin-socket {}", one.pid, one.address, one.admin_socket)
            });
            let listed: String = listed.collect();
            Err(AdminError::usage(
                format!("several llama-wardens are running:{listed}"),
                "name one with --admin-socket, or its configuration with --config",
            ))
        }
    }
}

impl AdminClient {
    /// Creates a client of the socket that the operator named.
    pub fn new(socket: PathBuf) -> Self {
        Self { socket, owner: None }
    }

    /// Creates a client of an instance that was found.
    pub fn from_located(found: &LocatedInstance) -> Self {
        Self { socket: PathBuf::from(&found.instance.admin_socket), owner: Some(found.owner) }
    }

    /// Connects, and checks the peer's user: another user may have bound the path while no instance ran.
    ///
    /// # Errors
    /// The instance does not accept, or another user answers.
    pub async fn connect(&self) -> Result<UnixStream, AdminError> {
        let shown = self.socket.display();
        let connecting = async {
            loop {
                match UnixStream::connect(&self.socket).await {
                    Err(full) if full.kind() == io::ErrorKind::WouldBlock => sleep(QUEUE_PAUSE).await,
                    done => return done,
                }
            }
        };
        let cannot =
            |problem: &dyn std::fmt::Display| format!("cannot talk to llama-warden on {shown}: {problem}");
        let connected = timeout(CONNECT_LIMIT, connecting).await.map_err(|_| {
            AdminError::hinted(
                cannot(&format!("no connection was accepted for {} s", CONNECT_LIMIT.as_secs())),
                "its log says what it waits for; a stopped one is continued with `kill -CONT PID`",
            )
        })?;
        let stream = connected.map_err(|problem| {
            AdminError::hinted(cannot(&problem), "does it run? Its socket is printed when `serve` starts")
        })?;
        let peer = stream.peer_cred().map_err(|problem| AdminError::failed(cannot(&problem)))?.uid();
        if self.accepts_peer(peer) {
            return Ok(stream);
        }
        Err(AdminError::hinted(
            format!(
                "{shown} is answered by user {peer}, who does not run this llama-warden: nothing was sent"
            ),
            "check who made the socket; `admin.socket` belongs in a directory that no other user can write to",
        ))
    }

    fn accepts_peer(&self, peer: u32) -> bool {
        let own = geteuid().as_raw();
        match self.owner {
            Some(owner) => peer == owner || (peer == ROOT && own != ROOT),
            None if peer == own || peer == ROOT => true,
            // Root manages services of other users, whose sockets lie in folders that root has given to them.
            None if own == ROOT => self
                .socket
                .parent()
                .is_some_and(|folder| trusted_path::path_owner(folder).is_ok_and(|owner| owner == peer)),
            None => false,
        }
    }

    /// Returns the instance's status; `None` if the instance does not answer within the limit.
    pub async fn status(&self) -> Option<AdminStatus> {
        let limit = warden_policies::defaults().child.version_timeout;
        let asking = self.json(Method::GET, &["status"]);
        timeout(limit, asking).await.ok()?.ok()
    }

    /// Requests JSON. `segments`: parts of the path.
    ///
    /// # Errors
    /// The instance does not answer, or refuses.
    pub async fn json<T: DeserializeOwned>(
        &self,
        method: Method,
        segments: &[&str],
    ) -> Result<T, AdminError> {
        self.json_with(method, segments, &[]).await
    }

    /// Requests JSON, with a query. `segments`: parts of the path.
    ///
    /// # Errors
    /// The instance does not answer, or refuses.
    pub async fn json_with<T: DeserializeOwned>(
        &self,
        method: Method,
        segments: &[&str],
        query: &[(&str, String)],
    ) -> Result<T, AdminError> {
        let body = self.send(method, segments, query).await?.read_all().await?;
        serde_json::from_slice(&body).map_err(|problem| unreadable_answer(&problem))
    }

    /// Requests text. `segments`: parts of the path.
    ///
    /// # Errors
    /// The instance does not answer, or refuses.
    pub async fn text(&self, segments: &[&str]) -> Result<String, AdminError> {
        let body = self.send(Method::GET, segments, &[]).await?.read_all().await?;
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    /// Requests JSON lines and passes each to `each`, until the answer ends or `each` fails. `wishes`: query
    /// parameters such as `follow` and `reveal`.
    ///
    /// # Errors
    /// The instance does not answer, or refuses; the connection breaks; or `each` fails.
    pub async fn lines<T: DeserializeOwned, E: From<AdminError>>(
        &self,
        segments: &[&str],
        wishes: &[&str],
        mut each: impl FnMut(&str, Option<T>) -> Result<(), E>,
    ) -> Result<(), E> {
        let wishes: Vec<_> = wishes.iter().map(|wish| (*wish, "1".to_owned())).collect();
        let mut answer = self.send(Method::GET, segments, &wishes).await?;
        let mut rest = Vec::new();
        while let Some(frame) = answer.response.body_mut().frame().await {
            let frame =
                frame.map_err(|problem| AdminError::failed(format!("the connection broke: {problem}")))?;
            let Ok(chunk) = frame.into_data() else { continue };
            rest.extend_from_slice(&chunk);
            while let Some(end) = rest.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = rest.drain(..=end).collect();
                let line = String::from_utf8_lossy(&line);
                each(line.trim_end(), serde_json::from_str(&line).ok())?;
            }
            if rest.len() > LARGEST_ANSWER {
                return Err(unreadable_answer(&"a line of it does not end").into());
            }
        }
        Ok(())
    }

    async fn send(
        &self,
        method: Method,
        segments: &[&str],
        query: &[(&str, String)],
    ) -> Result<ClientAnswer, AdminError> {
        let url = request_url(segments, query)?;
        let target =
            url.query().map_or_else(|| url.path().to_owned(), |query| format!("{}?{query}", url.path()));
        let broken = |problem: &dyn std::fmt::Display| {
            AdminError::failed(format!("cannot talk to llama-warden on {}: {problem}", self.socket.display()))
        };
        let request = Request::builder().method(method).uri(target).header(HOST, "localhost");
        let request = request.body(Empty::<Bytes>::new()).map_err(|problem| broken(&problem))?;
        let stream = TokioIo::new(self.connect().await?);
        let (mut sender, connection) = http1::handshake(stream).await.map_err(|problem| broken(&problem))?;
        let mut tasks = JoinSet::new();
        // An error of the connection also appears in the answer, so it is ignored here.
        tasks.spawn(async move { drop(connection.await) });
        let response = sender.send_request(request).await.map_err(|problem| broken(&problem))?;
        let answer = ClientAnswer { response, _sender: sender, _tasks: tasks };
        let status = answer.response.status();
        if status.is_success() { Ok(answer) } else { Err(answer.read_refusal(status).await) }
    }
}

/// An answer whose body has not been read yet.
struct ClientAnswer {
    response: Response<Incoming>,
    /// Sender that, together with `_tasks`, keeps the connection open.
    _sender: http1::SendRequest<Empty<Bytes>>,
    _tasks: JoinSet<()>,
}

impl ClientAnswer {
    async fn read_all(self) -> Result<Bytes, AdminError> {
        let body = Limited::new(self.response.into_body(), LARGEST_ANSWER).collect().await;
        body.map(http_body_util::Collected::to_bytes).map_err(|problem| unreadable_answer(&problem))
    }

    async fn read_refusal(self, status: StatusCode) -> AdminError {
        let body = self.read_all().await.unwrap_or_default();
        let body: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
        let message =
            body["error"].as_str().map_or_else(|| format!("llama-warden answered {status}"), str::to_owned);
        let lines: Vec<&str> =
            body["lines"].as_array().into_iter().flatten().filter_map(serde_json::Value::as_str).collect();
        if lines.is_empty() {
            AdminError::failed(message)
        } else {
            AdminError::failed(format!("{message}\nlast lines of llama-server:\n  {}", lines.join("\n  ")))
        }
    }
}

fn unreadable_answer(problem: &dyn std::fmt::Display) -> AdminError {
    AdminError::failed(format!("the answer cannot be read: {problem}"))
}

fn request_url(segments: &[&str], query: &[(&str, String)]) -> Result<Url, AdminError> {
    let bad = || AdminError::failed("the address of the admin route cannot be made");
    let mut url = Url::parse("http://localhost/").map_err(|_| bad())?;
    url.path_segments_mut().map_err(|()| bad())?.clear().extend(segments);
    if !query.is_empty() {
        url.query_pairs_mut().extend_pairs(query);
        // A space can be written in two ways in a query; `/series` reads only `%20`.
        let plain = url.query().map(|query| query.replace('+', "%20"));
        url.set_query(plain.as_deref());
    }
    Ok(url)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::InstanceInfo;

    #[test]
    fn a_name_with_slashes_and_spaces_is_one_segment() {
        let wishes = ["follow", "reveal"].map(|wish| (wish, "1".to_owned()));
        let url = request_url(&["models", "org/a b%", "logs"], &wishes).unwrap();
        assert_eq!((url.path(), url.query()), ("/models/org%2Fa%20b%25/logs", Some("follow=1&reveal=1")));
    }

    #[test]
    fn with_no_instance_the_hint_says_how_to_start_one() {
        let dir = tempfile::tempdir().unwrap();
        let Err(failure) = find_instance(None, dir.path(), &[], None) else { panic!("found one") };
        assert!(matches!(failure, AdminError::Failed { .. }), "{failure:?}");
        assert!(failure.lines()[1].contains("llama-warden serve"));
    }

    #[test]
    fn of_several_instances_the_one_that_serves_where_the_configuration_says_is_meant() {
        let several = ["127.0.0.1:8080", "127.0.0.1:8081"].map(|address| LocatedInstance {
            instance: InstanceInfo {
                address: address.to_owned(),
                admin_socket: format!("/run/{address}"),
                ..InstanceInfo::default()
            },
            owner: 1,
        });
        let chosen = choose_instance(&several, Some("127.0.0.1:8081")).ok().map(|client| client.socket);
        assert_eq!(chosen, Some(PathBuf::from("/run/127.0.0.1:8081")));
        for unclear in [None, Some("127.0.0.1:9")] {
            let Err(failure) = choose_instance(&several, unclear) else { panic!("one was guessed") };
            assert!(failure.lines()[1].contains("--config"), "{:?}", failure.lines());
        }
    }
}
