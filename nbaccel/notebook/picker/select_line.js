const area = this.closest('.nbaccel-editor').querySelector('textarea');
const lines = area.value.split('\n'), number = Number(this.dataset.line) - 1;
const start = lines.slice(0, number).join('\n').length + (number > 0 ? 1 : 0);
area.focus();
area.setSelectionRange(start, start + (lines[number] || '').length);
area.scrollTop = area.scrollHeight * Math.max(0, number - 3) / lines.length;
