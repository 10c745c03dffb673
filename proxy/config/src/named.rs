//! Names without a process of their own (`[names]`).

use schemars::JsonSchema;
use serde::Deserialize;
use warden_policies::modes::ChooseMode;

use super::request::RequestConfig;
use super::schema;

/// A name for one of several models, or for a model with other request settings. A model's own name may be
/// used, too, for that model alone.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NameConfig {
    /// The models of the name, the best first. Required.
    pub models: Vec<String>,
    /// Which model answers a request. `loaded`: the first that is loaded, or else is loading, or else the
    /// first. `room`: the first that is loaded or fits without unloading another model, or else the first.
    /// Models whose processes do not start are skipped. Default: `"loaded"`.
    #[serde(default)]
    #[schemars(schema_with = "schema::choose")]
    pub choose: ChooseMode,
    /// Changes to requests under this name. They override the same settings in the model's own `request`.
    #[serde(default)]
    pub request: RequestConfig,
}
