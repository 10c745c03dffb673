//! Keep-alives for an event stream whose answer waits for a llama-server process.
//!
//! A comment satisfies HTTP proxies. Clients such as Codex and Claude Code reset their timeout on events
//! only, so the streams of `/v1/messages` and `/v1/responses` also get a harmless event.

use bytes::Bytes;

use crate::refusal::ErrorDialect;

/// Returns a comment, followed by an event if clients of this dialect need one. `comment` is a single line of
/// text. `has_begun`: the client already has events of the answer.
pub(super) fn keep_alive(dialect: ErrorDialect, has_begun: bool, comment: &str) -> Bytes {
    let event = match dialect {
        ErrorDialect::Anthropic => "event: ping\ndata: {\"type\":\"ping\"}\n\n",
        // OpenAI's own streams have this event. OpenAI's Python client (3.54) fails if the first event is
        // not `response.created`, or if a second `response.created` has another id. So no event is harmless
        // before the answer begins.
        ErrorDialect::Responses if has_begun => "event: keepalive\ndata: {\"type\":\"keepalive\"}\n\n",
        ErrorDialect::Responses | ErrorDialect::OpenAi => "",
    };
    Bytes::from(format!(": {comment}\n\n{event}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_dialect_gets_the_event_that_its_clients_count_as_life() {
        for has_begun in [false, true] {
            let sign = |dialect| keep_alive(dialect, has_begun, "x");
            assert_eq!(sign(ErrorDialect::OpenAi), ": x\n\n");
            assert_eq!(sign(ErrorDialect::Anthropic), ": x\n\nevent: ping\ndata: {\"type\":\"ping\"}\n\n");
            let alive = if has_begun { "event: keepalive\ndata: {\"type\":\"keepalive\"}\n\n" } else { "" };
            assert_eq!(sign(ErrorDialect::Responses), format!(": x\n\n{alive}"));
        }
    }
}
