//! Requests of the supervisor itself to a backend: probes, properties, counters. Clients' requests use
//! another path.
//!
//! On a TCP port each request has its own connection, which is checked before anything is sent on it.
//! Another program that took the port gets nothing, least of all the key.

use std::time::Duration;

use bytes::Bytes;

use crate::process::endpoint::ListenAddress;
use crate::process::own_port::{OnlyToOwner, OwnPort};

#[derive(Debug)]
pub(crate) struct BackendHttp {
    client: Option<reqwest::Client>,
    /// Host and port in URLs; meaningless on a Unix socket.
    authority: String,
    key: Option<String>,
}

impl BackendHttp {
    /// Uses no pool: llama-server closes an idle connection after 5 s, and probes are too far apart for a
    /// pool to help. `port`: the process that has to listen there, if others could.
    pub(crate) fn new(endpoint: &ListenAddress, key: Option<String>, port: Option<OwnPort>) -> Self {
        let builder = reqwest::Client::builder();
        let (builder, authority) = match endpoint {
            ListenAddress::Unix(socket) => (builder.unix_socket(socket.as_path()), "backend".to_owned()),
            ListenAddress::Tcp(address) => (builder, address.to_string()),
        };
        let builder = builder
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never())
            .pool_max_idle_per_host(0);
        let builder = match port {
            Some(port) => builder.connector_layer(OnlyToOwner::new(port)),
            None => builder,
        };
        let client = builder.build();
        let client =
            client.inspect_err(|error| tracing::error!(%error, "cannot make a client for probes")).ok();
        Self { client, authority, key }
    }

    /// Sends JSON by `POST`. `None` without an answer in time.
    pub(crate) async fn post(&self, path: &str, body: Bytes, timeout: Duration) -> Option<reqwest::Response> {
        let mut request =
            self.client.as_ref()?.post(format!("http://{}{path}", self.authority)).timeout(timeout);
        if let Some(key) = &self.key {
            request = request.bearer_auth(key);
        }
        let request = request.header(reqwest::header::CONTENT_TYPE, "application/json").body(body);
        // The body contains a client's text. A server that answers without reading it must not parse it as
        // a request.
        let request = request.header(reqwest::header::CONNECTION, "close");
        request.send().await.inspect_err(|error| tracing::debug!(path, %error, "no answer")).ok()
    }

    /// Sends a `GET`. `None` without an answer in time.
    pub(crate) async fn get(&self, path: &str, timeout: Duration) -> Option<reqwest::Response> {
        let mut request =
            self.client.as_ref()?.get(format!("http://{}{path}", self.authority)).timeout(timeout);
        // `/health` needs no key, so none is sent.
        if let Some(key) = self.key.as_ref().filter(|_| path != "/health") {
            request = request.bearer_auth(key);
        }
        request.send().await.inspect_err(|error| tracing::trace!(path, %error, "probe lost")).ok()
    }
}
