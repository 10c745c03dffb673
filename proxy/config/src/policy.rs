//! The keys of a model's `policy` and of `[shared]`, as they are written and as they are read.
//!
//! Sizes, shares and `auto` stay what they are here: what they come to is known when the machine, its GPUs and the
//! first readings of a backend are. Nothing here decides.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer};
use warden_policies::defaults;
use warden_policies::recycle::RecyclePolicy;
use warden_policies::schedule::Windows;
use warden_policies::{ByteSize, MemoryLimit};

use super::schema::{self, Of};

/// When a backend is replaced, and what is asked of it before it takes more.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[schemars(extend("additionalProperties" = false))]
pub struct Policy {
    /// Budgets on anonymous host memory, swapped pages included.
    #[serde(default)]
    #[schemars(with = "HostKeys")]
    pub host: Budgets,
    /// Budgets on VRAM, for each GPU by itself.
    #[serde(default)]
    #[schemars(with = "VramKeys")]
    pub vram: Budgets,
    /// Replaced when quiet after this many requests.
    #[schemars(range(min = 1))]
    pub max_requests: Option<u64>,
    /// Replaced when quiet at this age.
    #[serde(default, deserialize_with = "optional_duration")]
    #[schemars(schema_with = "schema::age")]
    pub max_age: Option<Duration>,
    /// Replacements that can wait happen only within these times of day, in the machine's time zone: one, or a list. Hard
    /// budgets do not wait. Default: any time.
    #[serde(default)]
    #[schemars(schema_with = "schema::windows")]
    pub only: Windows,
    /// The numbers and modes that have defaults.
    #[serde(flatten)]
    #[schemars(with = "Of<defaults::Recycle>")]
    pub common: defaults::Recycle,
}

/// A soft and a hard budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Budgets {
    /// Replaced when quiet above this.
    pub soft: Option<MemoryLimit>,
    /// Drained now above this.
    pub hard: Option<MemoryLimit>,
}

impl Policy {
    /// What the policy says as decisions take it. A share of the machine's memory becomes a size where that is given; what
    /// `auto` is, is known only when the backend has settled.
    pub fn recycle(&self, memory: Option<ByteSize>) -> RecyclePolicy {
        RecyclePolicy {
            host_soft: self.host.soft.map(|limit| resolved(limit, memory)),
            host_hard: self.host.hard.map(|limit| resolved(limit, memory)),
            vram_soft: self.vram.soft,
            vram_hard: self.vram.hard,
            max_requests: self.max_requests,
            max_age: self.max_age,
            only: self.only.clone(),
            ..RecyclePolicy::new(&self.common)
        }
    }
}

fn resolved(limit: MemoryLimit, total: Option<ByteSize>) -> MemoryLimit {
    total.and_then(|total| limit.resolve(total)).map_or(limit, MemoryLimit::Bytes)
}

impl Budgets {
    /// What is wrong if the hard budget is below the soft one. A share of a total that is not known cannot be compared
    /// with a size.
    pub fn wrong_order(self, total: Option<ByteSize>) -> Option<String> {
        let (soft, hard) = (resolved(self.soft?, total), resolved(self.hard?, total));
        let below = match (soft, hard) {
            (MemoryLimit::Bytes(soft), MemoryLimit::Bytes(hard)) => hard < soft,
            (MemoryLimit::Percent(soft), MemoryLimit::Percent(hard)) => hard < soft,
            _ => false,
        };
        below.then(|| format!("the hard budget ({hard}) is below the soft one ({soft})"))
    }
}

/// Budgets over all backends at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Shared {
    /// Anonymous host memory of all backends together.
    #[schemars(with = "SharedHostKeys")]
    pub host: Budgets,
    /// VRAM of all backends together, on each GPU.
    #[schemars(with = "SharedVramKeys")]
    pub vram: Budgets,
}

/// The keys of `host` in a `policy`.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is used")]
struct HostKeys {
    /// Above this a backend is replaced when quiet, or within `quiet_within`. A share is one of the machine's memory.
    #[schemars(schema_with = "schema::budget")]
    soft: (),
    /// Above this it is drained now.
    #[schemars(schema_with = "schema::budget")]
    hard: (),
}

/// The keys of `vram` in a `policy`.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is used")]
struct VramKeys {
    /// The same for VRAM, on each GPU by itself. A share is one of the GPU's memory.
    #[schemars(schema_with = "schema::budget")]
    soft: (),
    /// Above this it is drained now.
    #[schemars(schema_with = "schema::budget")]
    hard: (),
}

/// The keys of `[shared.host]`.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is used")]
struct SharedHostKeys {
    /// Above this, all backends together, the one whose replacement gives back most is replaced when quiet. A share is one
    /// of the machine's memory.
    #[schemars(schema_with = "schema::limit")]
    soft: (),
    /// Above this it is drained now.
    #[schemars(schema_with = "schema::limit")]
    hard: (),
}

/// The keys of `[shared.vram]`.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is used")]
struct SharedVramKeys {
    /// Above this, all backends together on any one GPU, one is replaced when quiet. A share is one of the GPU's memory.
    #[schemars(schema_with = "schema::limit")]
    soft: (),
    /// Above this it is drained now.
    #[schemars(schema_with = "schema::limit")]
    hard: (),
}

pub(super) fn optional_duration<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Duration>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    text.map(|text| defaults::parse_duration(&text).map_err(serde::de::Error::custom)).transpose()
}
