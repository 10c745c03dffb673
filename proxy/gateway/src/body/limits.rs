//! Limits of a request body: its size and its minimum rate.

use warden_policies::defaults::Server;

use crate::body::body_rate::BodyRate;
use crate::config::GatewayConfig;
use crate::refusal::{BodyError, RequestRefusal};
use crate::route::BodySize;

/// Limits of a body or of its rest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BodyLimits {
    /// Size limit of the whole body, in bytes.
    pub(crate) bytes: u64,
    /// Name of the setting for that limit.
    pub(crate) key: &'static str,
    /// Minimum rate.
    pub(crate) rate: BodyRate,
    /// A slot waits for the body, which could not be held completely.
    pub(crate) in_slot: bool,
}

impl BodyLimits {
    /// Returns the limits of a body of this class.
    pub(crate) fn for_size(config: &GatewayConfig, size: BodySize) -> Self {
        let (bytes, key) = match size {
            BodySize::Prompt => (config.server.body_bytes, "server.body_bytes"),
            BodySize::Audio => (config.server.audio_body_bytes, "server.audio_body_bytes"),
            BodySize::Text => (config.server.text_body_bytes, "server.text_body_bytes"),
            BodySize::Control => (config.server.control_body_bytes, "server.control_body_bytes"),
        };
        let narrower = matches!(size, BodySize::Text | BodySize::Control) && config.server.body_bytes < bytes;
        let (bytes, key) =
            if narrower { (config.server.body_bytes, "server.body_bytes") } else { (bytes, key) };
        let rate =
            BodyRate::new(config.server.body_timeout, config.server.body_rate.0, config.server.body_deadline);
        Self { bytes: bytes.0, key, rate, in_slot: false }
    }

    /// Returns the limits while a slot waits for the rest of the body.
    pub(crate) fn while_in_slot(self, config: &Server) -> Self {
        let (pause, rate) = (config.slot_body_pause, config.slot_body_rate.0);
        Self { rate: BodyRate::new(pause, rate, config.body_deadline), in_slot: true, ..self }
    }

    /// Returns the refusal of a body that failed.
    pub(crate) fn refusal(self, fault: BodyError) -> RequestRefusal {
        match fault {
            BodyError::TooLarge => RequestRefusal::BodyTooLarge { limit: self.bytes, key: self.key },
            // With room to hold it, the body could have come as slowly as any other.
            BodyError::TooSlow if self.in_slot => RequestRefusal::Busy,
            BodyError::TooSlow => RequestRefusal::BodyTooSlow,
            BodyError::Undecodable => RequestRefusal::BodyUndecodable,
            BodyError::TooDense => RequestRefusal::BodyTooDense,
            BodyError::TwoModels => RequestRefusal::TwoModels,
            // The code that sends bodies reports the last two in more detail.
            BodyError::Broken | BodyError::Quarantined | BodyError::Stopped => RequestRefusal::BodyBroken,
        }
    }
}
