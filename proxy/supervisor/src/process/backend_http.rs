//! Requests that the supervisor itself sends to a backend: probes, properties, counters. The gateway sends
//! clients' requests without this module.
//!
//! On a TCP port, each request has its own connection, which is checked before anything is sent. So another
//! program that took the port gets neither a request nor the API key.

use std::time::Duration;

use bytes::Bytes;

use crate::process::endpoint::ListenAddress;
use crate::process::own_port::{OnlyToOwner, OwnPort};

#[derive(Debug)]
pub(crate) struct BackendHttp {
    client: Option<reqwest::Client>,
    /// Host and port for URLs; without meaning on a Unix socket.
    authority: String,
    key: Option<String>,
}

impl BackendHttp {
    /// Makes a client without a connection pool: llama-server closes an idle connection after 5 s, and
    /// probes are less frequent. `port`: check that the child listens there, if another program could.
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

    /// Sends JSON by `POST`. `None` if there is no answer in time.
    pub(crate) async fn post(&self, path: &str, body: Bytes, timeout: Duration) -> Option<reqwest::Response> {
        let mut request =
            self.client.as_ref()?.post(format!("http://{}{path}", self.authority)).timeout(timeout);
        if let Some(key) = &self.key {
            request = request.bearer_auth(key);
        }
        let request = request.header(reqwest::header::CONTENT_TYPE, "application/json").body(body);
        // Close the connection after this request: the body contains a client's text, and a server that
        // answers without reading the body would otherwise parse it as the next request.
        let request = request.header(reqwest::header::CONNECTION, "close");
        request.send().await.inspect_err(|error| tracing::debug!(path, %error, "no answer")).ok()
    }

    /// Sends a `GET`. `None` if there is no answer in time.
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
