//! Formats a line of the access log. Each request writes one, so this module formats by hand instead of
//! with a general, slower formatter.

use std::io::Write as _;
use std::time::Duration;

use http::Version;
use warden_gateway::RequestRecord;

pub(crate) fn log_request(record: &RequestRecord) {
    tracing::info!(
        target: "access",
        id = record.request_id,
        key = record.key.as_deref(),
        model = record.model.as_ref().map(tracing::field::display),
        generation = record.generation.map(|generation| generation.0),
        method = record.method.as_str(),
        route = record.route,
        protocol = protocol_name(record.protocol),
        status = record.status,
        outcome = record.outcome.as_str(),
        stream = record.stream,
        late_status = record.late_status.filter(|status| *status != 200),
        queue_ms = rounded_ms(record.queued),
        ttfb_ms = record.first_byte.map(rounded_ms),
        total_ms = rounded_ms(record.total),
        prompt_tokens = record.work.prompt_tokens,
        output_tokens = record.work.output_tokens,
        bytes_in = record.bytes_in,
        bytes_out = record.bytes_out,
        retries = record.retries,
        continued = record.continued.then_some(true),
        peer = %record.peer,
        user_agent = record.user_agent.as_deref(),
    );
}

/// Returns a line with its line end, as text or JSON; no level, because all lines have the same one.
pub(crate) fn format_line(record: &RequestRecord, now: &[u8], json: bool) -> Vec<u8> {
    let mut line = LineWriter { out: Vec::with_capacity(512), digits: itoa::Buffer::new(), json };
    line.write_start(now);
    line.write_quoted("id", &record.request_id);
    if let Some(key) = &record.key {
        line.write_quoted("key", key);
    }
    if let Some(model) = &record.model {
        line.write_quoted("model", model.as_str());
    }
    if let Some(generation) = record.generation {
        line.write_number("generation", generation.0);
    }
    line.write_word("method", record.method.as_str());
    line.write_word("route", record.route);
    line.write_word("protocol", protocol_name(record.protocol));
    line.write_number("status", record.status.into());
    line.write_word("outcome", record.outcome.as_str());
    line.write_name("stream");
    line.out.extend_from_slice(if record.stream { b"true" } else { b"false" });
    if let Some(late) = record.late_status.filter(|status| *status != 200) {
        line.write_number("late_status", late.into());
    }
    line.write_ms("queue_ms", record.queued);
    if let Some(first_byte) = record.first_byte {
        line.write_ms("ttfb_ms", first_byte);
    }
    line.write_ms("total_ms", record.total);
    line.write_number("prompt_tokens", record.work.prompt_tokens);
    line.write_number("output_tokens", record.work.output_tokens);
    line.write_number("bytes_in", record.bytes_in);
    line.write_number("bytes_out", record.bytes_out);
    line.write_number("retries", record.retries.into());
    if record.continued {
        line.write_name("continued");
        line.out.extend_from_slice(b"true");
    }
    line.write_peer(record);
    if let Some(user_agent) = &record.user_agent {
        line.write_quoted("user_agent", user_agent);
    }
    line.finish()
}

/// Converts to milliseconds, rounded to whole microseconds, because more digits are noise.
fn rounded_ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

fn protocol_name(version: Version) -> &'static str {
    match version {
        Version::HTTP_10 => "http/1.0",
        _ => "http/1.1",
    }
}

struct LineWriter {
    out: Vec<u8>,
    digits: itoa::Buffer,
    json: bool,
}

impl LineWriter {
    fn write_start(&mut self, now: &[u8]) {
        if self.json {
            self.out.extend_from_slice(b"{\"timestamp\":\"");
            self.out.extend_from_slice(now);
            self.out.push(b'"');
        } else {
            self.out.extend_from_slice(now);
            self.out.extend_from_slice(b" access:");
        }
    }

    fn write_name(&mut self, name: &str) {
        if self.json {
            self.out.extend_from_slice(b",\"");
            self.out.extend_from_slice(name.as_bytes());
            self.out.extend_from_slice(b"\":");
        } else {
            self.out.push(b' ');
            self.out.extend_from_slice(name.as_bytes());
            self.out.push(b'=');
        }
    }

    /// Writes a fixed word or a method, which has bounded length and needs no escaping.
    fn write_word(&mut self, name: &str, word: &str) {
        self.write_name(name);
        self.write_quote();
        self.out.extend_from_slice(word.as_bytes());
        self.write_quote();
    }

    fn write_quote(&mut self) {
        if self.json {
            self.out.push(b'"');
        }
    }

    fn write_quoted(&mut self, name: &str, text: &str) {
        self.write_name(name);
        let is_plain = |byte: u8| matches!(byte, b' '..=b'~') && !matches!(byte, b'"' | b'\\');
        // Writing to memory does not fail, and a text can always be serialized.
        if text.bytes().all(is_plain) {
            self.out.push(b'"');
            self.out.extend_from_slice(text.as_bytes());
            self.out.push(b'"');
        } else if self.json {
            let _whole = serde_json::to_writer(&mut self.out, text);
        } else {
            let _whole = write!(self.out, "{text:?}");
        }
    }

    fn write_number(&mut self, name: &str, number: u64) {
        self.write_name(name);
        self.out.extend_from_slice(self.digits.format(number).as_bytes());
    }

    fn write_ms(&mut self, name: &str, time: Duration) {
        let micros = u64::try_from((time.as_nanos() + 500) / 1000).unwrap_or(u64::MAX);
        self.write_number(name, micros / 1000);
        let mut part = micros % 1000;
        if part > 0 {
            self.out.push(b'.');
            for unit in [100, 10, 1] {
                self.out.push(b'0' + u8::try_from(part / unit).unwrap_or(0));
                part %= unit;
                if part == 0 {
                    break;
                }
            }
        }
    }

    fn write_peer(&mut self, record: &RequestRecord) {
        self.write_name("peer");
        self.write_quote();
        let _whole = write!(self.out, "{}", record.peer);
        self.write_quote();
    }

    fn finish(mut self) -> Vec<u8> {
        if self.json {
            self.out.extend_from_slice(b",\"target\":\"access\"}");
        }
        self.out.push(b'\n');
        self.out
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use warden_gateway::RequestOutcome;
    use warden_policies::{GenerationId, ModelName, WorkDone};

    const NOW: &[u8] = b"2026-01-02T03:04:05.000006Z";

    pub(crate) fn record() -> RequestRecord {
        RequestRecord {
            request_id: "r\"1".into(),
            peer: [127, 0, 0, 1].into(),
            method: http::Method::POST,
            protocol: Version::HTTP_11,
            user_agent: Some("an agent/1.0".into()),
            key: Some("alice".into()),
            route: "chat",
            model: Some(ModelName::new("a model")),
            generation: Some(GenerationId(3)),
            status: 200,
            late_status: None,
            outcome: RequestOutcome::Ok,
            stream: true,
            queued: Duration::from_micros(1500),
            first_byte: Some(Duration::from_millis(20)),
            first_token: Some(Duration::from_millis(20)),
            total: Duration::from_nanos(30_000_400),
            bytes_in: 5,
            bytes_out: 6,
            work: WorkDone { prompt_tokens: 7, output_tokens: 8, ..WorkDone::default() },
            retries: 1,
            canary_part: None,
            trace: None,
            continued: true,
        }
    }

    #[test]
    fn a_line_is_text_or_json_with_the_same_fields() {
        let record = RequestRecord { late_status: Some(400), ..record() };
        let text = String::from_utf8(format_line(&record, NOW, false)).unwrap();
        assert_eq!(
            text,
            "2026-01-02T03:04:05.000006Z access: id=\"r\\\"1\" key=\"alice\" model=\"a model\" generation=3 method=POST \
             route=chat protocol=http/1.1 status=200 outcome=ok stream=true late_status=400 queue_ms=1.5 ttfb_ms=20 total_ms=30 \
             prompt_tokens=7 output_tokens=8 bytes_in=5 bytes_out=6 retries=1 continued=true peer=127.0.0.1 user_agent=\"an agent/1.0\"\n"
        );
        let json: serde_json::Value = serde_json::from_slice(&format_line(&record, NOW, true)).unwrap();
        let fields: Vec<&str> =
            text.split(' ').filter_map(|word| word.split_once('=')).map(|one| one.0).collect();
        for field in fields {
            assert!(!json[field].is_null(), "{field} is missing in {json}");
        }
        assert_eq!(
            (&json["key"], &json["queue_ms"], &json["target"]),
            (&"alice".into(), &1.5.into(), &"access".into())
        );
        let unknown = RequestRecord { key: None, model: None, generation: None, first_byte: None, ..record };
        let json: serde_json::Value = serde_json::from_slice(&format_line(&unknown, NOW, true)).unwrap();
        assert!(json.get("key").is_none() && json.get("ttfb_ms").is_none(), "{json}");
    }

    #[test]
    fn times_have_the_digits_that_they_need_and_words_are_masked() {
        for (nanos, text) in [
            (0, "0"),
            (499, "0"),
            (500, "0.001"),
            (1_000_000, "1"),
            (1_010_000, "1.01"),
            (1_999_600, "2"),
            (1_100_000, "1.1"),
            (12_345_678_901, "12345.679"),
        ] {
            let record = RequestRecord { total: Duration::from_nanos(nanos), ..record() };
            let line = String::from_utf8(format_line(&record, NOW, false)).unwrap();
            assert!(line.contains(&format!(" total_ms={text} ")), "{nanos}: {line}");
            let line: serde_json::Value = serde_json::from_slice(&format_line(&record, NOW, true)).unwrap();
            assert_eq!(line["total_ms"].to_string(), text, "{nanos}");
        }
        for id in ["a\nb", "\u{e9}", "\\", "\"x\" forged=1", "\u{7f}"] {
            let record = RequestRecord { request_id: id.to_owned(), ..record() };
            let line = String::from_utf8(format_line(&record, NOW, false)).unwrap();
            assert!(line.contains(&format!(" id={id:?} ")) && line.lines().count() == 1, "{line}");
            let line: serde_json::Value = serde_json::from_slice(&format_line(&record, NOW, true)).unwrap();
            assert_eq!(line["id"], id);
        }
    }
}
