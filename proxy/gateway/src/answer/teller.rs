//! Progress messages for the client of a stream while its model loads.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use serde_json::json;
use tokio::time::Instant;
use warden_policies::ModelName;
use warden_supervisor::NextProcess;

use crate::answer::life_sign::keep_alive;
use crate::backend::backends::LeaseProvider;
use crate::refusal::ErrorDialect;

/// Form of the progress messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoadingNoticeForm {
    /// Comments and events that clients skip.
    Comments,
    /// Reasoning text, in chat chunks.
    Reasoning,
}

/// Writes the progress messages of one stream.
pub(crate) struct LoadingNotifier {
    backends: Arc<dyn LeaseProvider>,
    model: ModelName,
    request_id: String,
    manner: LoadingNoticeForm,
    dialect: ErrorDialect,
    began: Instant,
    /// Last message sent; an equal message is not sent again.
    last_notice: Option<String>,
}

impl LoadingNotifier {
    pub(crate) fn new(
        backends: Arc<dyn LeaseProvider>,
        model: ModelName,
        request_id: String,
        manner: LoadingNoticeForm,
        dialect: ErrorDialect,
        began: Instant,
    ) -> Self {
        Self { backends, model, request_id, manner, dialect, began, last_notice: None }
    }

    /// Returns the next keep-alive.
    pub(crate) fn next_sign(&mut self) -> Bytes {
        let now = Instant::now();
        let coming = self.backends.next_process(&self.model);
        match self.manner {
            LoadingNoticeForm::Comments => {
                let far = coming.map_or_else(|| "starts".to_owned(), |coming| describe_stage(&coming, now));
                let waited = now.saturating_duration_since(self.began).as_secs();
                keep_alive(self.dialect, false, &format!("the model {far}; waited for {waited} s"))
            }
            LoadingNoticeForm::Reasoning => {
                let stage =
                    coming.map_or_else(|| "starts".to_owned(), |coming| describe_first_stage(&coming));
                let text = if self.last_notice.as_ref() == Some(&stage) {
                    ".".to_owned()
                } else {
                    let line = if self.last_notice.is_some() { "\n" } else { "" };
                    format!("{line}`{}` {stage} ", self.model)
                };
                self.last_notice = Some(stage);
                self.chunk(&text)
            }
        }
    }

    /// Returns the text that closes the messages when the model answers; `None` if no message was sent.
    pub(crate) fn end_notice(&self) -> Option<Bytes> {
        self.last_notice.as_ref().map(|_| self.chunk("\n\n"))
    }

    fn chunk(&self, text: &str) -> Bytes {
        let created = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs();
        let chunk = json!({
            "choices": [{ "delta": { "reasoning_content": text }, "finish_reason": null, "index": 0 }],
            "created": created,
            "id": format!("chatcmpl-{}", self.request_id),
            "model": self.model.as_str(),
            "object": "chat.completion.chunk",
        });
        Bytes::from(format!("data: {chunk}\n\n"))
    }
}

/// Describes the state of the load, and the remaining time if known.
fn describe_stage(coming: &NextProcess, now: Instant) -> String {
    let mut words = stage_verb(coming).to_owned();
    if let Some(left) =
        coming.time_left(now).filter(|left| *left >= Duration::from_secs(1) && coming.since.is_some())
    {
        // Writing to a String cannot fail.
        let _written = write!(words, ", some {} s are left", left.as_secs());
    }
    words
}

/// Describes the state of the load in words that stay the same until it changes.
fn describe_first_stage(coming: &NextProcess) -> String {
    let mut words = stage_verb(coming).to_owned();
    if let Some(took) = coming.took.filter(|took| *took >= Duration::from_secs(1) && coming.since.is_some()) {
        let _written = write!(words, " (the last time it took {} s)", took.as_secs());
    }
    words
}

fn stage_verb(coming: &NextProcess) -> &'static str {
    match (coming.since, coming.waits_for_room) {
        (Some(_), _) => "is being loaded",
        (None, true) => "waits until other models are unloaded for it",
        (None, false) => "waits to be loaded",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_told_how_far_a_load_is_as_far_as_that_is_known() {
        let now = Instant::now();
        let unknown = NextProcess::default();
        assert_eq!(describe_stage(&unknown, now), "waits to be loaded");
        let room = NextProcess { waits_for_room: true, took: Some(Duration::from_secs(40)), ..unknown };
        assert_eq!(describe_stage(&room, now), "waits until other models are unloaded for it");
        let loads = NextProcess { since: now.checked_sub(Duration::from_secs(15)), ..room };
        assert_eq!(describe_stage(&loads, now), "is being loaded, some 25 s are left");
        assert_eq!(describe_first_stage(&loads), "is being loaded (the last time it took 40 s)");
        let late = NextProcess { since: now.checked_sub(Duration::from_secs(50)), ..room };
        assert_eq!(
            describe_stage(&late, now),
            "is being loaded",
            "it takes longer than the last one, nobody knows how long"
        );
    }
}
