//! Recorded requests, sent again in their order: a JSON object per line.
//!
//! ```text
//! {"method": "POST", "path": "/v1/chat/completions", "body": {"messages": [ … ], "stream": true}}
//! ```
//!
//! `method` is `POST` if absent; other fields are ignored. The whole file is checked before a process starts.

use std::path::Path;

use reqwest::Method;
use serde_json::Value;

use crate::client::LabRequest;
use crate::error::DiagnoseError;

/// Requests of a recording.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestRecording {
    asks: Vec<LabRequest>,
    torn: usize,
}

impl RequestRecording {
    /// Reads a recording.
    ///
    /// # Errors
    ///
    /// The file cannot be read, has no request, or has a line that is no request.
    pub fn read(path: &Path) -> Result<Self, DiagnoseError> {
        let bad = |what: String| DiagnoseError::Recording { path: path.to_owned(), what };
        let text =
            std::fs::read_to_string(path).map_err(|error| bad(format!("it cannot be read: {error}")))?;
        Self::parse(&text).map_err(bad)
    }

    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut asks = Vec::new();
        let mut torn = 0;
        for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            match serde_json::from_str(line) {
                Ok(value) => {
                    asks.push(parse_request(value).map_err(|what| format!("line {}: {what}", index + 1))?);
                }
                Err(error) if error.is_eof() => torn += 1,
                Err(error) => return Err(format!("line {}: not a JSON object: {error}", index + 1)),
            }
        }
        if asks.is_empty() {
            return Err("there is no request in it".to_owned());
        }
        Ok(Self { asks, torn })
    }

    /// Returns the number of skipped lines that are truncated, because the recorder was killed.
    pub fn torn_lines(&self) -> usize {
        self.torn
    }

    /// Returns the number of requests.
    pub fn len(&self) -> usize {
        self.asks.len()
    }

    /// Always returns false, because [`Self::read`] refuses a file without requests.
    pub fn is_empty(&self) -> bool {
        self.asks.is_empty()
    }

    pub(crate) fn asks(&self) -> &[LabRequest] {
        &self.asks
    }

    /// After the last request, the recording starts over.
    pub(crate) fn request_at(&self, step: u64) -> Option<&LabRequest> {
        let count = u64::try_from(self.asks.len()).ok()?;
        self.asks.get(usize::try_from(step.checked_rem(count)?).ok()?)
    }
}

fn parse_request(mut value: Value) -> Result<LabRequest, String> {
    if !value.is_object() {
        return Err("not a JSON object".to_owned());
    }
    let method = match &value["method"] {
        Value::Null => Method::POST,
        Value::String(name) => name.parse().map_err(|_| format!("`method` is `{name}`, which is none"))?,
        other => return Err(format!("`method` is {other}: it is a text")),
    };
    let path = match &value["path"] {
        Value::String(path) if path.starts_with('/') => path.clone(),
        Value::Null => return Err("no field `path`".to_owned()),
        other => return Err(format!("`path` is {other}: it begins with `/`")),
    };
    let body = value.as_object_mut().and_then(|fields| fields.remove("body")).filter(|body| !body.is_null());
    if body.as_ref().is_some_and(|body| !body.is_object() && !body.is_array()) {
        return Err("`body` is neither a JSON object nor a list".to_owned());
    }
    let media = |kinds: &[&str]| body.as_ref().map_or(0, |body| count_parts(body, kinds));
    let images = media(&["image_url", "input_image", "image"]);
    let audio = media(&["input_audio"]);
    Ok(LabRequest { method, path, body, images, audio })
}

fn count_parts(value: &Value, kinds: &[&str]) -> u64 {
    match value {
        Value::Array(items) => items.iter().map(|item| count_parts(item, kinds)).sum(),
        Value::Object(fields) => {
            let own = fields.get("type").and_then(Value::as_str).is_some_and(|kind| kinds.contains(&kind));
            u64::from(own) + fields.values().map(|value| count_parts(value, kinds)).sum::<u64>()
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_counted_and_repeated() {
        let text =
            r#"{"path": "/v1/chat/completions", "at": 1, "body": {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}},
            {"type": "input_audio", "input_audio": {}}]}]}}"#
                .replace('\n', "");
        let recording =
            RequestRecording::parse(&format!("{text}\n\n{{\"method\": \"GET\", \"path\": \"/props\"}}\n"))
                .unwrap();
        assert_eq!(recording.len(), 2);
        let first = recording.request_at(0).unwrap();
        assert_eq!((first.images, first.audio, &first.method), (1, 1, &Method::POST));
        assert_eq!(recording.request_at(2), Some(first));
        assert_eq!(
            (&recording.request_at(1).unwrap().method, &recording.request_at(1).unwrap().body),
            (&Method::GET, &None)
        );
    }

    #[test]
    fn half_a_line_of_a_recorder_that_was_killed_is_passed_over_and_counted() {
        let torn = "{\"path\": \"/a\"}\n{\"path\": \"/b\", \"bo\n{\"path\": \"/c\"}\n{\"pa";
        let recording = RequestRecording::parse(torn).unwrap();
        assert_eq!((recording.len(), recording.torn_lines()), (2, 2));
        assert!(RequestRecording::parse("{\"path\": \"/a").unwrap_err().contains("no request"));
    }

    #[test]
    fn what_is_no_request_is_told_with_its_line() {
        for (text, what) in [
            ("", "there is no request"),
            ("{\"path\": \"/a\"}\nnot", "line 2: not a JSON object"),
            ("[1]", "line 1: not a JSON object"),
            ("{\"body\": {}}", "no field `path`"),
            ("{\"path\": \"http://else/\"}", "it begins with `/`"),
            ("{\"path\": \"/a\", \"body\": 3}", "`body` is neither"),
            ("{\"path\": \"/a\", \"method\": \"A B\"}", "`method` is `A B`"),
        ] {
            let error = RequestRecording::parse(text).unwrap_err();
            assert!(error.contains(what), "{text}: {error}");
        }
    }
}
