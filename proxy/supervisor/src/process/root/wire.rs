//! Blocking messages between our processes over a private socket: four bytes with the length, then JSON. File
//! descriptors may be attached to the first of these bytes.

use std::io::{self, IoSlice, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Maximum number of files per message. The kernel allows 253.
pub const MAX_FILES: usize = 64;
/// Size limit of a message. The growth detector's state for one process takes some 100 KB.
const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// Sends a message with file descriptors, of which the receiver gets duplicates.
///
/// # Errors
///
/// The other side is gone or accepts nothing within the socket's timeout, or the message is too large.
pub fn send_message(
    mut to: &UnixStream,
    message: &impl Serialize,
    files: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    let fits = text.len() <= MAX_MESSAGE_BYTES && files.len() <= MAX_FILES;
    let length = if fits { u32::try_from(text.len()).ok() } else { None };
    let length = length.ok_or_else(|| io::Error::other("the message is too large"))?.to_be_bytes();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(io::Error::other("too many files"));
    }
    // The first byte carries the files, so send the rest without them.
    let sent = rustix::net::sendmsg(to, &[IoSlice::new(&length)], &mut control, SendFlags::NOSIGNAL)?;
    to.write_all(&length[sent..])?;
    to.write_all(&text)
}

/// Receives one message and its files.
///
/// # Errors
///
/// The other side is gone, sends nothing within the socket's timeout, or sends no such message.
pub fn receive_message<T: DeserializeOwned>(mut from: &UnixStream) -> io::Result<(T, Vec<OwnedFd>)> {
    let mut length = [0; 4];
    let mut files = Vec::new();
    let mut got = 0;
    while got < length.len() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(&mut length[got..])];
        let received = match rustix::net::recvmsg(from, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => continue,
            received => received?,
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                files.extend(fds);
            }
        }
        if received.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        got += received.bytes;
    }
    let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
    if length > MAX_MESSAGE_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message is too large"));
    }
    let mut text = vec![0; length];
    from.read_exact(&mut text)?;
    Ok((serde_json::from_slice(&text)?, files))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn messages_arrive_whole_each_with_its_own_files_and_the_end_is_told() {
        let (one, other) = UnixStream::pair().unwrap();
        let (reader, writer) = io::pipe().unwrap();
        let long = "x".repeat(20_000);
        send_message(&one, &("first", 1), &[]).unwrap();
        send_message(&one, &(&long, 2), &[writer.as_fd()]).unwrap();
        send_message(&one, &("third", 3), &[]).unwrap();
        drop((one, writer));
        let (first, none): ((String, u32), _) = receive_message(&other).unwrap();
        assert_eq!((first.0.as_str(), first.1, none.len()), ("first", 1, 0));
        let ((text, number), files): ((String, u32), _) = receive_message(&other).unwrap();
        assert_eq!((text == long, number, files.len()), (true, 2, 1));
        std::fs::File::from(files.into_iter().next().unwrap()).write_all(b"through it").unwrap();
        let mut read = String::new();
        io::BufReader::new(reader).read_to_string(&mut read).unwrap();
        assert_eq!(read, "through it");
        let (third, _): ((String, u32), _) = receive_message(&other).unwrap();
        assert_eq!(third.0, "third");
        let end = receive_message::<(String, u32)>(&other).unwrap_err();
        assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn what_is_no_message_is_told_and_takes_no_memory() {
        let (mut one, other) = UnixStream::pair().unwrap();
        one.write_all(&u32::MAX.to_be_bytes()).unwrap();
        assert_eq!(receive_message::<u32>(&other).unwrap_err().kind(), io::ErrorKind::InvalidData);
        let (mut one, other) = UnixStream::pair().unwrap();
        one.write_all(&[0, 0, 0, 2, b'}', b'{']).unwrap();
        assert!(receive_message::<u32>(&other).is_err());
    }
}
