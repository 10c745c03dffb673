//! Limits of a request body: its size and its minimum rate.

use warden_policies::defaults::Server;

use crate::body::body_rate::BodyRate;
use crate::config::GatewayConfig;
use crate::refusal::{BodyError, RequestRefusal};
use crate::route::BodySize;

/// Limits of a body, or of the rest of a body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BodyLimits {
    /// Size limit of the whole body, in bytes.
    pub(crate) bytes: u64,
    /// Configuration key of the size limit.
    pub(crate) key: &'static str,
    /// Minimum rate.
    pub(crate) rate: BodyRate,
    /// A slot waits for the body, because the budget had no room to hold the whole body first.
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

    /// Returns these limits with the stricter rate that applies while a slot waits for the rest of the body.
    pub(crate) fn while_in_slot(self, config: &Server) -> Self {
        let (pause, rate) = (config.slot_body_pause, config.slot_body_rate.0);
        Self { rate: BodyRate::new(pause, rate, config.body_deadline), in_slot: true, ..self }
    }

    /// Returns the refusal of a body that failed.
    pub(crate) fn refusal(self, fault: BodyError) -> RequestRefusal {
        match fault {
            BodyError::TooLarge => RequestRefusal::BodyTooLarge { limit: self.bytes, key: self.key },
            // The gateway was too full to hold the body; otherwise a slow body would have been accepted.
            BodyError::TooSlow if self.in_slot => RequestRefusal::Busy,
            BodyError::TooSlow => RequestRefusal::BodyTooSlow,
            BodyError::Undecodable => RequestRefusal::BodyUndecodable,
            BodyError::TooDense => RequestRefusal::BodyTooDense,
            BodyError::TwoModels => RequestRefusal::TwoModels,
            // The code that sends bodies reports `Quarantined` and `Stopped` in more detail.
            BodyError::Broken | BodyError::Quarantined | BodyError::Stopped => RequestRefusal::BodyBroken,
        }
    }
}
