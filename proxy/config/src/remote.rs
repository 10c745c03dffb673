//! Models served by remote endpoints (`[remotes]`).

use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Deserialize;

use super::policy::optional_duration;
use super::request::RequestConfig;
use super::schema;

/// A model served by a remote endpoint.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RemoteModel {
    /// URL of the endpoint, with the path before `/v1` if there is one: `https://host/api/v1`. Required.
    pub url: String,
    /// Name of the model at the endpoint. Default: its name here.
    pub model: Option<String>,
    /// File with the key for the endpoint. Keys of clients are never passed on. Default: none.
    #[schemars(schema_with = "schema::path")]
    pub key_file: Option<PathBuf>,
    /// Other names that clients may use.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// Maximum number of concurrent requests; others wait in the queue. Default: 64.
    pub max_in_flight: Option<u32>,
    /// Time limit for a whole answer. Default: that of `upstream.exchange_timeout`.
    #[serde(default, deserialize_with = "optional_duration")]
    #[schemars(schema_with = "schema::age")]
    pub timeout: Option<Duration>,
    /// Changes to requests.
    #[serde(default)]
    pub request: RequestConfig,
}
