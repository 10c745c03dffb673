//! Server-sent events: turns bytes into events, and events or a JSON answer into what a client understands.

use serde_json::Value;

/// Collects bytes and returns whole events, independent of HTTP chunks.
#[derive(Debug, Default)]
pub struct Events {
    rest: Vec<u8>,
}

impl Events {
    /// Adds bytes; returns the `data` of every event completed by them. Comments are left out.
    pub fn feed(&mut self, bytes: &[u8]) -> Vec<String> {
        self.rest.extend_from_slice(bytes);
        let mut events = Vec::new();
        while let Some(end) = self.rest.windows(2).position(|two| two == b"\n\n") {
            let whole: Vec<u8> = self.rest.drain(..end + 2).collect();
            let text = String::from_utf8_lossy(&whole);
            let data: Vec<&str> =
                text.lines().filter_map(|line| line.strip_prefix("data:")).map(str::trim_start).collect();
            if !data.is_empty() {
                events.push(data.join("\n"));
            }
        }
        events
    }

    /// Bytes of an incomplete event.
    pub fn rest(&self) -> &[u8] {
        &self.rest
    }
}

/// Answer to a generating request, streamed or not, in any of the three dialects.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Answer {
    /// The generated text.
    pub text: String,
    /// `finish_reason`, or llama-server's `stop_type`.
    pub finish: Option<String>,
    /// True after the terminal event: `[DONE]`, or `"stop": true`.
    pub done: bool,
    /// The `error` object, in the body or in the stream.
    pub error: Option<Value>,
    /// The `usage` object.
    pub usage: Option<Value>,
    /// The `timings` object.
    pub timings: Option<Value>,
    /// Number of events.
    pub events: usize,
}

impl Answer {
    /// Creates an answer from the events of a stream.
    pub fn from_events<S: AsRef<str>>(events: impl IntoIterator<Item = S>) -> Self {
        let mut answer = Self::default();
        for event in events {
            answer.event(event.as_ref());
        }
        answer
    }

    /// Creates an answer from a JSON body.
    pub fn from_whole(body: &Value) -> Self {
        let mut answer = Self::default();
        answer.take(body);
        answer.done = answer.error.is_none();
        answer
    }

    /// Adds the data of an event.
    pub fn event(&mut self, data: &str) {
        self.events += 1;
        if data == "[DONE]" {
            self.done = true;
        } else if let Ok(value) = serde_json::from_str(data) {
            self.take(&value);
        }
    }

    /// Returns true if the answer is complete and has no error.
    pub fn is_whole(&self) -> bool {
        self.done && self.error.is_none() && self.finish.is_some()
    }

    fn take(&mut self, value: &Value) {
        let choice = &value["choices"][0];
        for text in
            [&choice["delta"]["content"], &choice["message"]["content"], &choice["text"], &value["content"]]
        {
            self.text.push_str(text.as_str().unwrap_or_default());
        }
        if let Some(finish) = choice["finish_reason"].as_str().or(value["stop_type"].as_str()) {
            self.finish = Some(finish.to_owned());
        }
        self.done |= value["stop"].as_bool().unwrap_or(false);
        for (name, place) in
            [("error", &mut self.error), ("usage", &mut self.usage), ("timings", &mut self.timings)]
        {
            if let Some(found) = value.get(name).filter(|found| !found.is_null()) {
                *place = Some(found.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_split_anywhere_are_whole_again() {
        let bytes = b"data: {\"a\":1}\n\n: ping\n\ndata: [DONE]\n\n";
        for cut in 0..bytes.len() {
            let mut events = Events::default();
            let mut all = events.feed(&bytes[..cut]);
            all.extend(events.feed(&bytes[cut..]));
            assert_eq!(all, ["{\"a\":1}", "[DONE]"], "cut at {cut}");
            assert!(events.rest().is_empty());
        }
    }

    #[test]
    fn a_stream_and_a_whole_answer_say_the_same() {
        let stream = Answer::from_events([
            r#"{"choices":[{"delta":{"role":"assistant","content":null},"finish_reason":null}]}"#,
            r#"{"choices":[{"delta":{"content":"a b"},"finish_reason":null}]}"#,
            r#"{"choices":[{"delta":{},"finish_reason":"length"}]}"#,
            "[DONE]",
        ]);
        let whole =
            serde_json::json!({"choices": [{"message": {"content": "a b"}, "finish_reason": "length"}]});
        let whole = Answer::from_whole(&whole);
        assert_eq!((&stream.text, &stream.finish, stream.done), (&whole.text, &whole.finish, whole.done));
    }
}
