//! What a diagnosis says, as far as it is kept: its last lines, each of bounded length.

use std::collections::VecDeque;

use warden_policies::secrets;

/// Lines that are kept.
const LINES: usize = 200;
/// Bytes of a line that are kept.
const LONGEST: usize = 1000;

/// Where something was said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pipe {
    Out = 0,
    Error = 1,
}

/// The last lines.
#[derive(Debug, Default)]
pub(crate) struct Told {
    lines: VecDeque<String>,
    /// Of each of its two pipes the line that has not ended.
    open: [Vec<u8>; 2],
}

impl Told {
    /// Takes in what was said on a pipe; a line is kept when it has ended.
    pub(crate) fn take(&mut self, pipe: Pipe, said: &[u8]) {
        for byte in said {
            let open = &mut self.open[pipe as usize];
            match byte {
                b'\n' => self.end_line(pipe),
                _ if open.len() < LONGEST => open.push(*byte),
                _ => {}
            }
        }
    }

    /// Nothing more comes.
    pub(crate) fn end(&mut self) {
        for pipe in [Pipe::Out, Pipe::Error] {
            if !self.open[pipe as usize].is_empty() {
                self.end_line(pipe);
            }
        }
    }

    fn end_line(&mut self, pipe: Pipe) {
        let line = std::mem::take(&mut self.open[pipe as usize]);
        let line = String::from_utf8_lossy(&line).trim_end().to_owned();
        if line.is_empty() && self.lines.back().is_none_or(String::is_empty) {
            return;
        }
        if self.lines.len() >= LINES {
            self.lines.pop_front();
        }
        // It may quote a server, which may have quoted a key.
        self.lines.push_back(secrets::text(&line));
    }

    /// Those that are kept, the oldest first.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.lines.iter().cloned().collect()
    }

    /// The last one that is not empty.
    pub(crate) fn last(&self) -> Option<&str> {
        self.lines.iter().rev().find(|line| !line.is_empty()).map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_put_together_bounded_and_without_secrets() {
        let mut told = Told::default();
        told.take(Pipe::Out, b"one\ntw");
        assert_eq!((told.lines(), told.last()), (vec!["one".to_owned()], Some("one")));
        told.take(Pipe::Error, b"between\n");
        told.take(Pipe::Out, b"o\n\n\nHF_TOKEN=hf_abcdefghijklmnopqrstuvwxyzABCD1234\n");
        told.take(Pipe::Out, &[b'x'; 5000]);
        told.end();
        let lines = told.lines();
        assert_eq!((lines[2].as_str(), lines[3].as_str()), ("two", ""));
        assert!(!lines[4].contains("abcdef") && lines[5].len() == LONGEST, "{lines:?}");
        for n in 0..1000 {
            told.take(Pipe::Out, format!("line {n}\n").as_bytes());
        }
        assert_eq!((told.lines().len(), told.last()), (LINES, Some("line 999")));
    }
}
