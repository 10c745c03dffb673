//! What the terminal calls a key, and what we call it. Pure.

use crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::input::Key;

/// `None` for what has no meaning here, and for keys that are let go.
pub(super) fn key(event: KeyEvent) -> Option<Key> {
    if event.kind == KeyEventKind::Release {
        return None;
    }
    let control = event.modifiers.contains(KeyModifiers::CONTROL);
    Some(match event.code {
        KeyCode::Char(letter) if control => Key::Ctrl(letter.to_ascii_lowercase()),
        KeyCode::Char(_) if event.modifiers.contains(KeyModifiers::ALT) => return None,
        KeyCode::Char(letter) => Key::Char(letter),
        KeyCode::F(number) => Key::F(number),
        KeyCode::Up => Key::Up,
        KeyCode::Down => Key::Down,
        KeyCode::Left => Key::Left,
        KeyCode::Right => Key::Right,
        KeyCode::PageUp => Key::PageUp,
        KeyCode::PageDown => Key::PageDown,
        KeyCode::Home => Key::Home,
        KeyCode::End => Key::End,
        KeyCode::Enter => Key::Enter,
        KeyCode::Esc => Key::Esc,
        KeyCode::Backspace => Key::Backspace,
        KeyCode::Tab => Key::Tab,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_one_name_and_those_let_go_have_none() {
        let of = |code, modifiers| key(KeyEvent::new(code, modifiers));
        assert_eq!(of(KeyCode::Char('C'), KeyModifiers::CONTROL), Some(Key::Ctrl('c')));
        assert_eq!(of(KeyCode::Char('G'), KeyModifiers::SHIFT), Some(Key::Char('G')));
        assert_eq!(of(KeyCode::Char('r'), KeyModifiers::ALT), None);
        assert_eq!(of(KeyCode::F(10), KeyModifiers::NONE), Some(Key::F(10)));
        assert_eq!(of(KeyCode::Insert, KeyModifiers::NONE), None);
        let mut gone = KeyEvent::new(KeyCode::Enter, KeyModifiers::NONE);
        gone.kind = KeyEventKind::Release;
        assert_eq!(key(gone), None);
    }
}
