//! Runs a program on a terminal of its own, and records its output.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

use crate::{Context as _, Home, Trouble, wait_until};

/// Program on a terminal; killed with its session on drop.
#[derive(Debug)]
pub struct Terminal {
    child: Child,
    /// The test's end of the terminal.
    master: File,
    /// The program's end, kept open so that its last output can be read after its end.
    slave: OwnedFd,
    seen: Arc<Mutex<Vec<u8>>>,
}

impl Terminal {
    /// Starts a program as session leader, with the environment of `home`, on a terminal of this size.
    ///
    /// # Errors
    /// There is no free terminal, or no such program.
    #[expect(clippy::disallowed_methods, reason = "tests stop where the system has no thread to give")]
    pub fn start<S: AsRef<OsStr>>(
        home: &Home,
        program: &Path,
        args: impl IntoIterator<Item = S>,
        (columns, rows): (u16, u16),
    ) -> Result<Self, Trouble> {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        grantpt(&master)?;
        unlockpt(&master)?;
        let path = ptsname(&master, Vec::new())?.into_string()?;
        let slave: OwnedFd = File::options().read(true).write(true).open(path)?.into();
        tcsetwinsize(&slave, winsize(columns, rows))?;
        // `setsid` makes the terminal the session's own, which the test cannot do without `unsafe`.
        let child = Command::new("setsid")
            .arg("--ctty")
            .arg(program)
            .args(args)
            .env_clear()
            .envs(&home.env)
            .current_dir(home.path())
            .stdin(Stdio::from(slave.try_clone()?))
            .stdout(Stdio::from(slave.try_clone()?))
            .stderr(Stdio::from(slave.try_clone()?))
            .spawn()
            .context(program.display())?;
        let master = File::from(master);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (mut reader, kept) = (master.try_clone()?, Arc::clone(&seen));
        std::thread::spawn(move || {
            let mut piece = [0; 4096];
            while let Ok(count @ 1..) = reader.read(&mut piece) {
                kept.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(&piece[..count]);
            }
        });
        Ok(Self { child, master, slave, seen })
    }

    /// Output so far.
    pub fn seen(&self) -> String {
        String::from_utf8_lossy(&self.seen.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
    }

    /// Bytes of output so far.
    pub fn written(&self) -> usize {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Lines on the screen now.
    pub fn screen(&self) -> String {
        let mut screen = Grid::default();
        screen.write(&self.seen());
        screen.text()
    }

    /// Waits until all these words are on the screen at once.
    ///
    /// # Errors
    /// The words are not there within `deadline`; the error shows the screen.
    pub async fn shows(&self, words: &[&str], deadline: Duration) -> Result<(), Trouble> {
        let what = format!("{words:?} on the terminal");
        let all = wait_until(&what, deadline, async || {
            let screen = self.screen();
            words.iter().all(|word| screen.contains(word))
        });
        all.await.map_err(|late| Trouble::new(format!("{late}\n{}", self.screen())))
    }

    /// Types these keys.
    ///
    /// # Errors
    /// The terminal is gone.
    pub fn press(&mut self, keys: &str) -> Result<(), Trouble> {
        Ok(self.master.write_all(keys.as_bytes())?)
    }

    /// Changes the size of the terminal.
    ///
    /// # Errors
    /// The terminal is gone.
    pub fn resize(&self, columns: u16, rows: u16) -> Result<(), Trouble> {
        Ok(tcsetwinsize(&self.slave, winsize(columns, rows))?)
    }

    /// Returns true if the terminal edits lines and shows typed keys, as a shell needs.
    ///
    /// # Errors
    /// The terminal is gone.
    pub fn is_cooked(&self) -> Result<bool, Trouble> {
        let modes = tcgetattr(&self.slave)?.local_modes;
        Ok(modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG))
    }

    /// Sends the program a signal.
    pub fn signal(&self, signal: Signal) {
        if let Some(pid) = self.pid() {
            let _gone = kill_process(pid, signal);
        }
    }

    fn pid(&self) -> Option<Pid> {
        Pid::from_raw(i32::try_from(self.child.id()).ok()?)
    }

    /// Waits for the end of the program: returns its exit code, or -1 after a signal.
    ///
    /// # Errors
    /// The program still runs after `deadline`.
    pub async fn exit(&mut self, deadline: Duration) -> Result<i32, Trouble> {
        let mut code = None;
        let child = &mut self.child;
        wait_until("the program on the terminal ends", deadline, async || {
            let status = child.try_wait().ok().flatten();
            code = status.map(|status| status.code().unwrap_or_else(|| -status.signal().unwrap_or(1)));
            code.is_some()
        })
        .await?;
        code.context("it has ended")
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if let Some(pid) = self.pid() {
            let _gone = kill_process_group(pid, Signal::KILL);
        }
        let _gone = self.child.kill();
        let _gone = self.child.wait();
    }
}

type Behind = (Vec<Vec<char>>, (usize, usize));

/// Terminal emulator with the functions that our programs and a shell use.
#[derive(Debug, Default)]
struct Grid {
    lines: Vec<Vec<char>>,
    at: (usize, usize),
    /// Content and cursor of the main screen while the alternate screen is shown.
    behind: Option<Behind>,
}

impl Grid {
    fn write(&mut self, text: &str) {
        let mut letters = text.chars().peekable();
        while let Some(letter) = letters.next() {
            match letter {
                '\x1b' if letters.next_if_eq(&'[').is_some() => {
                    let mut words = String::new();
                    let end = loop {
                        match letters.next() {
                            Some(end @ '@'..='~') => break Some(end),
                            Some(other) => words.push(other),
                            None => break None,
                        }
                    };
                    self.obey(&words, end);
                }
                '\r' => self.at.1 = 0,
                '\n' => self.at.0 += 1,
                '\x08' => self.at.1 = self.at.1.saturating_sub(1),
                letter if letter.is_control() => {}
                letter => self.put(letter),
            }
        }
    }

    fn obey(&mut self, words: &str, end: Option<char>) {
        let number = |text: &str| text.parse::<usize>().unwrap_or(1).saturating_sub(1);
        match (words, end) {
            (_, Some('H')) => {
                let (row, column) = words.split_once(';').unwrap_or((words, ""));
                self.at = (number(row), number(column));
            }
            ("2", Some('J')) => self.lines.clear(),
            ("?1049", Some('h')) => self.behind = Some((std::mem::take(&mut self.lines), self.at)),
            ("?1049", Some('l')) => (self.lines, self.at) = self.behind.take().unwrap_or_default(),
            _ => {}
        }
    }

    fn put(&mut self, letter: char) {
        let (row, column) = self.at;
        if self.lines.len() <= row {
            self.lines.resize(row + 1, Vec::new());
        }
        let line = &mut self.lines[row];
        if line.len() <= column {
            line.resize(column + 1, ' ');
        }
        line[column] = letter;
        self.at.1 += 1;
    }

    fn text(&self) -> String {
        let line = |line: &Vec<char>| line.iter().collect::<String>().trim_end().to_owned() + "\n";
        self.lines.iter().map(line).collect()
    }
}

const fn winsize(columns: u16, rows: u16) -> Winsize {
    Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_screen_is_what_was_written_where() {
        let mut grid = Grid::default();
        grid.write("$ top\r\n\x1b[?1049h\x1b[2J\x1b[2;3H\x1b[1mab\x1b[0m\x1b[1;1Hx");
        assert_eq!(grid.text(), "x\n  ab\n");
        grid.write("\x1b[?1049l$ ");
        assert_eq!(grid.text(), "$ top\n$\n");
    }
}
