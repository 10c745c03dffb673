//! The command line's end of the admin socket.

use std::path::{Path, PathBuf};

use reqwest::{Method, Url};
use serde::de::DeserializeOwned;

use super::answer::Status;
use super::instance;
use crate::exit::Failure;

/// A connection to one instance.
pub(crate) struct Client {
    http: reqwest::Client,
    socket: PathBuf,
}

/// Finds the instance to talk to: the socket that was named, else the only one that the state directory knows of, else the
/// only one that has left word in one of `places`: it may keep its state elsewhere.
pub(crate) fn find(named: Option<PathBuf>, state: &Path, places: &[PathBuf]) -> Result<Client, Failure> {
    let socket = match named {
        Some(socket) => socket,
        None => match instance::nearest(state, places).as_slice() {
            [] => {
                return Err(Failure::hinted(
                    "no llama-warden is running here",
                    "start one with `llama-warden serve`, or name its socket with --admin-socket",
                ));
            }
            [only] => PathBuf::from(&only.admin_socket),
            several => {
                let listed = several.iter().map(|one| {
                    format!(
                        "\n  pid {} on http://{}: --admin-socket {}",
                        one.pid, one.address, one.admin_socket
                    )
                });
                let listed: String = listed.collect();
                return Err(Failure::usage(
                    format!("several llama-wardens are running:{listed}"),
                    "name one with --admin-socket",
                ));
            }
        },
    };
    Client::new(socket)
}

impl Client {
    /// A client of the instance behind a socket.
    pub(crate) fn new(socket: PathBuf) -> Result<Self, Failure> {
        let http = reqwest::Client::builder()
            .unix_socket(socket.clone())
            .redirect(reqwest::redirect::Policy::none())
            .build();
        let http =
            http.map_err(|problem| Failure::failed(format!("cannot make an HTTP client: {problem}")))?;
        Ok(Self { http, socket })
    }

    /// What the instance says of itself within a reasonable time; `None` if it says nothing.
    pub(crate) async fn status(&self) -> Option<Status> {
        let limit = warden_policies::defaults().child.version_timeout;
        let asking = self.json(Method::GET, &["status"]);
        tokio::time::timeout(limit, asking).await.ok()?.ok()
    }

    /// Asks and waits for the whole answer.
    pub(crate) async fn json<T: DeserializeOwned>(
        &self,
        method: Method,
        segments: &[&str],
    ) -> Result<T, Failure> {
        self.json_with(method, segments, &[]).await
    }

    /// The same with a query.
    pub(crate) async fn json_with<T: DeserializeOwned>(
        &self,
        method: Method,
        segments: &[&str],
        query: &[(&str, String)],
    ) -> Result<T, Failure> {
        let answer = self.send(method, segments, query).await?;
        answer
            .json()
            .await
            .map_err(|problem| Failure::failed(format!("the answer cannot be read: {problem}")))
    }

    /// Asks and waits for the whole answer, which is text.
    pub(crate) async fn text(&self, segments: &[&str]) -> Result<String, Failure> {
        let answer = self.send(Method::GET, segments, &[]).await?;
        let text = answer.text().await;
        text.map_err(|problem| Failure::failed(format!("the answer cannot be read: {problem}")))
    }

    /// Asks for JSON lines and hands each to `each`, until the answer ends or `each` fails. `wishes`: `follow`, `reveal`.
    pub(crate) async fn lines<T: DeserializeOwned>(
        &self,
        segments: &[&str],
        wishes: &[&str],
        mut each: impl FnMut(&str, Option<T>) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let wishes: Vec<_> = wishes.iter().map(|wish| (*wish, "1".to_owned())).collect();
        let mut answer = self.send(Method::GET, segments, &wishes).await?;
        let mut rest = Vec::new();
        loop {
            let chunk = answer.chunk().await;
            let Some(chunk) =
                chunk.map_err(|problem| Failure::failed(format!("the connection broke: {problem}")))?
            else {
                return Ok(());
            };
            rest.extend_from_slice(&chunk);
            while let Some(end) = rest.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = rest.drain(..=end).collect();
                let line = String::from_utf8_lossy(&line);
                each(line.trim_end(), serde_json::from_str(&line).ok())?;
            }
        }
    }

    async fn send(
        &self,
        method: Method,
        segments: &[&str],
        query: &[(&str, String)],
    ) -> Result<reqwest::Response, Failure> {
        let answer = self.http.request(method, url(segments, query)?).send().await.map_err(|problem| {
            let refused = problem.is_connect();
            let message = format!("cannot talk to llama-warden on {}: {problem}", self.socket.display());
            if refused {
                Failure::hinted(message, "does it run? Its socket is printed when `serve` starts")
            } else {
                Failure::failed(message)
            }
        })?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        let body: serde_json::Value = answer.json().await.unwrap_or_default();
        let message =
            body["error"].as_str().map_or_else(|| format!("llama-warden answered {status}"), str::to_owned);
        let lines: Vec<&str> =
            body["lines"].as_array().into_iter().flatten().filter_map(serde_json::Value::as_str).collect();
        Err(if lines.is_empty() {
            Failure::failed(message)
        } else {
            Failure::failed(format!("{message}\nlast lines of llama-server:\n  {}", lines.join("\n  ")))
        })
    }
}

fn url(segments: &[&str], query: &[(&str, String)]) -> Result<Url, Failure> {
    let bad = || Failure::failed("the address of the admin route cannot be made");
    let mut url = Url::parse("http://localhost/").map_err(|_| bad())?;
    url.path_segments_mut().map_err(|()| bad())?.clear().extend(segments);
    if !query.is_empty() {
        url.query_pairs_mut().extend_pairs(query);
        // A blank may be spelled in two ways, of which `/series` reads one.
        let plain = url.query().map(|query| query.replace('+', "%20"));
        url.set_query(plain.as_deref());
    }
    Ok(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_slashes_and_spaces_is_one_segment() {
        let wishes = ["follow", "reveal"].map(|wish| (wish, "1".to_owned()));
        let url = url(&["models", "org/a b%", "logs"], &wishes).unwrap();
        assert_eq!((url.path(), url.query()), ("/models/org%2Fa%20b%25/logs", Some("follow=1&reveal=1")));
    }

    #[test]
    fn with_no_instance_the_hint_says_how_to_start_one() {
        let dir = tempfile::tempdir().unwrap();
        let Err(failure) = find(None, dir.path(), &[]) else { panic!("found one") };
        assert_eq!(failure.code(), 1);
        assert!(failure.lines()[1].contains("llama-warden serve"));
    }
}
